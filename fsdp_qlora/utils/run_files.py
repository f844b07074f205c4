"""The names of the files in a run's folder."""

CHECKPOINTS = "checkpoints"
CARD = "README.md"  # the model card of a result
RECORD = "training.json"  # the training record of a result
BEST = "best"  # the adapter with the lowest evaluation loss
ADAPTERS = "rollout_adapters"  # the last adapters that a rollout server has loaded
SERVICE = "service.db"  # what a training service keeps, in its own folder
METRICS_FILE = "metrics.jsonl"
SAMPLES_FILE = "samples.jsonl"
ROLLOUTS_FILE = "rollouts.jsonl"  # the completions of a GRPO run
EPISODES_FILE = "episodes.jsonl"  # the turns of the episodes that such a run plays
LOCK = ".lock"
RUN = "run.json"
STATUS = "status.json"
RESULT = "result.json"
# Files that a run leaves in its folder. --resume auto:replace removes only these.
RUN_FILES = (
    "adapter_config.json",
    "adapter_model.safetensors",
    "config.json",
    "config.yaml",
    "generation_config.json",
    "metrics.jsonl",
    "metrics.jsonl.set_aside",
    "model*.safetensors",
    "model.safetensors.index.json",
    "rejected.jsonl",
    "rollouts.jsonl",
    EPISODES_FILE,
    "samples.jsonl",
    ADAPTERS,
    "additional_chat_templates",
    ".saving_weights",
    ".saving",
    "run.json",
    "status.json",
    "result.json",
    "hang_rank_*",
    "checkpoints",
    "facts.json",
    "report.html",
    "tensorboard",
    BEST,
    CARD,
    RECORD,
    ".from_mirror",
)
