"""Which operators the ways of attention call, what they wait for, and how far they are from
float64: one line of JSON.
"""

import json

import torch

from fsdp_qlora.distributed.device import configure_kernels
from fsdp_qlora.model.architecture.attention_ways import (
    attention_inputs,
    attention_ways,
    exact_attention,
)
from fsdp_qlora.model.architecture.shapes import BlockShape
from stand_in.counts import recording


def main() -> None:
    configure_kernels()  # as a run does
    device = torch.device("cuda")
    blocks = [BlockShape(hidden=64, heads=4, groups=2, head_dim=16)]
    found = {}
    for lengths in ((128, 128), (128, 60)):
        inputs = attention_inputs(blocks, lengths, torch.bfloat16, device)
        ways = attention_ways(inputs, device)
        found[str(lengths)] = {"missing": ways.missing, "ways": {}}
        exact = exact_attention(inputs[0])
        for name, way in ways.ways.items():
            activities = [torch.profiler.ProfilerActivity.CPU]
            with torch.profiler.profile(activities=activities) as profile, recording() as counts:
                outputs = way(inputs[0])
            called = {event.key for event in profile.key_averages() if "attention" in event.key}
            errors = [
                ((own - each).norm() / each.norm()).item()
                for own, each in zip(outputs, exact, strict=True)
            ]
            found[str(lengths)]["ways"][name] = {
                "called": sorted(called),
                "syncs": sum(counts.syncs.values()),
                "error": max(errors),
            }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
