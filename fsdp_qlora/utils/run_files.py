"""The names of the files in a run's folder."""

CHECKPOINTS = "checkpoints"
CARD, RECORD = "README.md", "training.json"  # what a result says of itself
BEST = "best"  # the adapter of the lowest held-out loss
ADAPTERS = "rollout_adapters"  # of the versions that a server has answered with last
METRICS_FILE = "metrics.jsonl"
SAMPLES_FILE = "samples.jsonl"
ROLLOUTS_FILE = "rollouts.jsonl"  # of a run that learns from its own answers
LOCK, RUN, STATUS, RESULT = ".lock", "run.json", "status.json", "result.json"
# Files that a run leaves in its folder; --overwrite_output_dir removes only these.
RUN_FILES = (
    "adapter_config.json", "adapter_model.safetensors", "config.json", "config.yaml", "generation_config.json",
    "metrics.jsonl", "metrics.jsonl.set_aside", "model*.safetensors", "model.safetensors.index.json", "rejected.jsonl",
    "rollouts.jsonl", "samples.jsonl", ADAPTERS,
    "additional_chat_templates", ".saving_weights", ".saving", "run.json", "status.json", "result.json", "hang_rank_*",
    "checkpoints", "facts.json", "report.html", "tensorboard", BEST, CARD, RECORD, ".from_mirror",
)  # fmt: skip
