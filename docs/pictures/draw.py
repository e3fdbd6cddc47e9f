"""Draws the pictures of docs/explanation: `python docs/pictures/draw.py` writes them again.

A picture is a sheet of lanes, side by side, in which time goes down. A step is a box in a lane and
a row; arrows join boxes.
"""

from functools import partial
from html import escape
from pathlib import Path

FOLDER = Path(__file__).parent

LANE, BOX, ROW, LINE, HEAD, MARGIN = 242, 222, 26, 17, 40, 12
STYLE = """
text { font-family: Helvetica, Arial, sans-serif; font-size: 13px; fill: #1f2933; }
.lane { font-weight: bold; fill: #52606d; }
.file { font-family: Menlo, Consolas, monospace; font-size: 11.5px; fill: #3e4c59; }
.box { fill: #ffffff; stroke: #7b8794; }
.stripe { fill: #f5f7fa; }
.arrow { stroke: #2f6f9f; stroke-width: 1.5; fill: none; marker-end: url(#tip); }
.both { marker-start: url(#tip); }
"""

# Each step has a name, a lane, a text and files. It is drawn below the step before it, or to the
# right of that step if its name begins with "=".
GRADIENT = (
    ("backward", 0, ["backward() writes", "a gradient into p.grad"], []),
    ("=ready", 1, ["a hook marks it as ready"],
     ["torch/averaging.py", "torch/gradients.py"]),
    ("full", 1, ["its bucket is full, and all", "earlier ones are sent"],
     ["training/averager.py"]),
    ("start", 1, ["starts the operation that was", "prepared with the bucket"],
     ["engine/prepared.py"]),
    ("=further", 0, ["backward() continues:", "none of this blocks it"], []),
    ("queued", 1, ["it gets a number and a", "schedule, and is queued"],
     ["engine/group.py", "operations/collectives.py"]),
    ("=stepped", 2, ["steps the schedules", "of all operations in turn"],
     ["engine/engine.py", "transport/base.py"]),
    ("agreed", 2, ["compares calls before any", "data is used"],
     ["operations/agreement.py"]),
    ("=calls", 3, ["their calls"], []),
    ("combined", 2,
     ["combines this rank's slice out", "of all ranks' buckets, and", "writes it into all"],
     ["collectives/shared.py", "memory/reduction.py"]),
    ("=buckets", 3,
     ["their buckets, in the same", "memory; between hosts by", "messages"], ["transport/mpi.py"]),
    ("end", 0, ["backward() ends"], []),
    ("=wait", 1, ["waits for the last buckets:", "p.grad has the mean"],
     ["torch/averaging.py", "training/averager.py", "engine/handle.py"]),
)
GRADIENT_ARROWS = (
    ("backward", "ready"), ("ready", "full"), ("full", "start"), ("start", "queued"),
    ("queued", "stepped"), ("stepped", "agreed"), ("agreed", "calls", "both"),
    ("agreed", "combined"), ("combined", "buckets", "both"), ("end", "wait"),
)
GRADIENT_LANES = ("PyTorch", "mpiring, in your thread", "mpiring's own thread", "other ranks")


BLOCKING = (
    ("call", 0, ["allreduce(x) looks up", "the prepared operation"], ["communicator.py"]),
    ("made", 0, ["runs the node call of", "the prepared operation"], ["engine/prepared.py"]),
    ("begin", 0, ["takes the next number,", "unless the gate is closed"],
     ["transport/protocol.py"]),
    ("=ordinary", 1, ["first run, or closed gate:", "builds a schedule"],
     ["engine/group.py", "operations/collectives.py", "operations/algorithms.py"]),
    ("write", 0, ["writes x to its slot,", "and publishes its flag"], ["transport/node_call.py"]),
    ("=look", 1, ["polls some hundred times"], ["engine/group.py"]),
    ("meet", 0, ["waits for the flags of others,", "and compares all digests"],
     ["transport/protocol.py"]),
    ("=late", 1, ["still waiting: the engine", "steps it"],
     ["engine/fast_calls.py", "engine/engine.py"]),
    ("reduce", 0, ["reduces all slots into x,", "and publishes that it is done"],
     ["transport/node_call.py"]),
    ("=next", 1, ["after the first run: prepares", "the node call"], ["engine/prepared.py"]),
)
BLOCKING_ARROWS = (
    ("call", "made"), ("made", "begin"), ("begin", "write"), ("begin", "ordinary"),
    ("ordinary", "look"), ("look", "late"), ("late", "next"), ("write", "meet"),
    ("meet", "reduce"), ("meet", "late"),
)
BLOCKING_LANES = ("a call like an earlier one", "an ordinary call")

# Layers from the top, each with its name and its rooms. Imports go down.
LAYERS = (
    ("guests", ["tools/", "horovod/", "asynchronous/", "elastic/", "simulated/"]),
    ("names for guests", ["provisional"]),
    ("adapters", ["torch/", "numpy/"]),
    ("training methods", ["training/", "optim/"]),
    ("gradients, data, checkpoints", ["reducers/", "data/", "resilience/"]),
    ("public interface", ["communicator", "world"]),
    ("progress", ["engine/", "record/"]),
    ("one operation", ["operations/", "collectives/"]),
    ("messages and memory", ["transport/", "launch/", "buckets/", "sharding/"]),
    ("vectors", ["gpu/", "memory/", "jit/", "config"]),
)


def picture(lanes, steps, arrows):
    """Return the SVG of a sheet."""
    boxes, top, row_top, row_end = {}, HEAD + MARGIN, HEAD + MARGIN, HEAD + MARGIN
    for name, lane, texts, files in steps:
        height = LINE * (len(texts) + len(files)) + 14
        if name.startswith("="):
            top = row_top
        else:
            top = row_top = row_end
        x = MARGIN + lane * LANE + (LANE - BOX) / 2
        boxes[name.lstrip("=")] = (x, top, height, texts, files)
        row_end = max(row_end, top + height + ROW) if name.startswith("=") else top + height + ROW
    width, height = 2 * MARGIN + LANE * len(lanes), row_end
    out = _opened(width, height)
    for number, lane in enumerate(lanes):
        x = MARGIN + number * LANE
        if number % 2 == 0:
            out.append(f'<rect class="stripe" x="{x}" y="0" width="{LANE}" height="{height}"/>')
        out.append(f'<text class="lane" x="{x + LANE / 2}" y="26" text-anchor="middle">'
                   f'{escape(lane)}</text>')
    out += [_arrow(boxes[first], boxes[second], *kind) for first, second, *kind in arrows]
    for x, y, height, texts, files in boxes.values():
        out.append(f'<rect class="box" x="{x}" y="{y}" width="{BOX}" height="{height}" rx="5"/>')
        lines = [("", text) for text in texts] + [(' class="file"', file) for file in files]
        out += [f'<text{kind} x="{x + 10}" y="{y + 19 + LINE * number}">{escape(line)}</text>'
                for number, (kind, line) in enumerate(lines)]
    return "\n".join([*out, "</svg>"]) + "\n"


def layers(rows):
    """Return the SVG of layers, the highest first: a name, then its rooms."""
    left, room, row = 230, 150, 44
    width = left + room * max(len(rooms) for _, rooms in rows) + 2 * MARGIN
    height = row * len(rows) + 2 * MARGIN
    out = _opened(width, height)
    for number, (name, rooms) in enumerate(rows):
        y = MARGIN + number * row
        if number % 2 == 0:
            out.append(f'<rect class="stripe" x="0" y="{y}" width="{width}" height="{row}"/>')
        out.append(f'<text class="lane" x="{MARGIN}" y="{y + 27}">{escape(name)}</text>')
        for place, text in enumerate(rooms):
            x = left + place * room
            out.append(f'<rect class="box" x="{x}" y="{y + 6}" width="{room - 14}" '
                       f'height="{row - 12}" rx="5"/>')
            out.append(f'<text class="file" x="{x + 10}" y="{y + 27}">{escape(text)}</text>')
    return "\n".join([*out, "</svg>"]) + "\n"


def _opened(width, height):
    """Return the lines with which every picture begins."""
    return [f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
            f'viewBox="0 0 {width} {height}">', f"<style>{STYLE}</style>",
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
            'markerHeight="7" orient="auto-start-reverse"><path d="M0 0 L8 4 L0 8 z" '
            'fill="#2f6f9f"/></marker></defs>',
            f'<rect width="{width}" height="{height}" fill="#ffffff"/>']


def _arrow(first, second, kind=""):
    (x1, y1, height1, *_), (x2, y2, height2, *_) = first, second
    if x1 == x2:
        ends = x1 + BOX / 2, y1 + height1, x2 + BOX / 2, y2
    else:
        y = max(y1, y2) + min(height1, height2) / 2
        ends = (x1 + BOX, y, x2, y) if x1 < x2 else (x1, y, x2 + BOX, y)
    return '<path class="{}" d="M{} {} L{} {}"/>'.format(f"arrow {kind}".strip(), *ends)


def ring(ranks):
    """Return the SVG of an allreduce around a ring: each rank's chunks, step after step.

    A chunk is a box with the ranks whose numbers are in it; the more, the darker.
    """
    box, gap, row, left, top = 40, 54, 58, 150, 70
    lane = ranks * box + gap
    steps = 2 * (ranks - 1)
    width, height = left + ranks * lane, top + steps * row + 36 + MARGIN
    out = [*_opened(width, height), f'<text class="file" x="{MARGIN}" y="52">chunk</text>']
    for rank in range(ranks):
        x = left + rank * lane
        out.append(f'<text class="lane" x="{x + ranks * box / 2}" y="26" text-anchor="middle">'
                   f'rank {rank}</text>')
        out += [f'<text class="file" x="{x + (chunk + 0.5) * box}" y="52" text-anchor="middle">'
                f'{chunk}</text>' for chunk in range(ranks)]
    # The ranks whose numbers are in each chunk of each rank.
    sums = [[{rank} for _ in range(ranks)] for rank in range(ranks)]
    for step in range(steps + 1):
        y = top + step * row
        title = ("start" if step == 0 else
                 f"step {step}: {'add' if step < ranks else 'copy'}")
        out.append(f'<text x="{MARGIN}" y="{y + 23}">{title}</text>')
        sent = [(rank - 1 - step) % ranks for rank in range(ranks)]
        for rank, chunk in ((rank, chunk) for rank in range(ranks) for chunk in range(ranks)):
            x, whose = left + rank * lane + chunk * box, sums[rank][chunk]
            color = ("#ffffff", "#dbe9f4", "#a9cbe5", "#6fa8d2")[
                (len(whose) - 1) * 3 // (ranks - 1)]
            out.append(f'<rect class="box" x="{x}" y="{y}" width="{box}" height="36" '
                       f'style="fill: {color}"/>')
            out.append(f'<text x="{x + box / 2}" y="{y + 23}" text-anchor="middle">'
                       f'{"".join(map(str, sorted(whose)))}</text>')
            if step < steps and chunk == sent[rank]:
                start = x + box / 2, y + 36
                out.append(_hop(start, (left, width), lane, row - 36, rank == ranks - 1))
        if step < steps:
            taken = [set(sums[rank][sent[rank]]) for rank in range(ranks)]
            for rank in range(ranks):
                sums[(rank + 1) % ranks][sent[rank]] |= taken[rank]
    return "\n".join([*out, "</svg>"]) + "\n"


def _hop(start, sides, lane, down, is_last):
    """Draw a chunk's way to the next rank; the last rank's leaves at one side, to come in again."""
    (x, y), (left, width) = start, sides
    below = y + down
    if not is_last:
        return f'<path class="arrow" d="M{x} {y} L{x + lane} {below}"/>'
    first = left + (x - left) % lane
    return (f'<path d="M{x} {y} L{width - 4} {y + 11}" style="stroke: #2f6f9f; fill: none"/>'
            f'<path class="arrow" d="M{left - 30} {y + 11} L{first} {below}"/>')


# A function that returns the SVG, for each file.
PICTURES = {
    "blocking_call.svg": partial(picture, BLOCKING_LANES, BLOCKING, BLOCKING_ARROWS),
    "gradient.svg": partial(picture, GRADIENT_LANES, GRADIENT, GRADIENT_ARROWS),
    "layers.svg": partial(layers, LAYERS),
    "ring.svg": partial(ring, 4),
}

if __name__ == "__main__":
    for file, draw in PICTURES.items():
        (FOLDER / file).write_text(draw())
