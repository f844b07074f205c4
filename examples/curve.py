"""Draw metrics of a run as an SVG: python examples/curve.py runs/sft --keys loss eval_loss --out
curve.svg

`fsdp-qlora report runs/sft` makes a page of all of them; this draws a small picture for a document.
"""

import argparse
import json
from pathlib import Path

WIDTH = 640
HEIGHT = 280
MARGIN = 48
COLORS = ("#3366cc", "#cc5533", "#339966", "#8855aa")


def curve(run: Path, key: str) -> list[tuple[float, float]]:
    """The steps and values of a metric in the run's metrics.jsonl."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [
        (record["step"], record[key])
        for record in records
        if isinstance(record.get(key), (int, float))
    ]


def draw(curves: dict[str, list[tuple[float, float]]]) -> str:
    """An SVG with one line per metric, and the limits of both axes."""
    points = [point for line in curves.values() for point in line]
    lowest_x = min(x for x, _ in points)
    highest_x = max(x for x, _ in points)
    lowest_y = min(y for _, y in points)
    highest_y = max(y for _, y in points)

    def place(x: float, y: float) -> str:
        across = MARGIN + (x - lowest_x) / ((highest_x - lowest_x) or 1) * (WIDTH - 2 * MARGIN)
        down = (
            HEIGHT - MARGIN - (y - lowest_y) / ((highest_y - lowest_y) or 1) * (HEIGHT - 2 * MARGIN)
        )
        return f"{across:.1f},{down:.1f}"

    bottom = HEIGHT - MARGIN
    right = WIDTH - MARGIN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" '
        'font-size="12" fill="#555">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
        f'<path d="M{MARGIN},{MARGIN} V{bottom} H{right}" stroke="#999" fill="none"/>',
        f'<text x="{MARGIN - 6}" y="{MARGIN + 4}" text-anchor="end">{highest_y:.3g}</text>',
        f'<text x="{MARGIN - 6}" y="{bottom + 4}" text-anchor="end">{lowest_y:.3g}</text>',
        f'<text x="{MARGIN}" y="{bottom + 18}">step {lowest_x:g}</text>',
        f'<text x="{right}" y="{bottom + 18}" text-anchor="end">step {highest_x:g}</text>',
    ]
    for number, (name, line) in enumerate(curves.items()):
        color = COLORS[number % len(COLORS)]
        path = " ".join(place(x, y) for x, y in line)
        parts.append(f'<polyline points="{path}" stroke="{color}" stroke-width="1.5" fill="none"/>')
        parts.append(
            f'<text x="{MARGIN + 150 * number}" y="{MARGIN - 16}" fill="{color}">{name}</text>'
        )
    return "\n".join([*parts, "</svg>\n"])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="output_dir of a run")
    parser.add_argument(
        "--keys", nargs="+", required=True, help="metrics, named as in metrics.jsonl"
    )
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    arguments.out.write_text(draw({key: curve(arguments.run, key) for key in arguments.keys}))


if __name__ == "__main__":
    main()
