"""Draws the pictures of docs/explanation: `python docs/pictures/draw.py` writes them anew.

A picture is a sheet of lanes, side by side, in which time goes down. A step is a box in a lane and
a row; arrows join boxes.
"""

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

# Each step: its name, its lane, what happens, in which files. A step stands below the one before
# it, or, where its name begins with "=", beside that.
GRADIENT = (
    ("backward", 0, ["backward() writes", "a gradient into p.grad"], []),
    ("=ready", 1, ["a hook marks it as ready"], ["torch/averaging.py"]),
    ("full", 1, ["its bucket is full, and all", "earlier ones are sent"],
     ["training/averager.py", "buckets/bucket.py"]),
    ("schedule", 1, ["the Reducer builds a schedule;", "the table has the algorithm"],
     ["reducers/reducer.py", "operations/operation.py", "operations/algorithms.py"]),
    ("=further", 0, ["backward() goes on:", "nothing of this blocks"], []),
    ("queued", 1, ["the operation gets a number", "and is queued"],
     ["communicator.py", "engine/group.py"]),
    ("=stepped", 2, ["steps the schedules", "of all operations in turn"],
     ["engine/engine.py", "transport/base.py"]),
    ("agreed", 2, ["compares calls before any", "data is used"],
     ["operations/agreement.py", "transport/node_memory.py"]),
    ("=calls", 3, ["what they called"], []),
    ("combined", 2,
     ["combines this rank's slice out", "of all ranks' buckets, and", "writes it into all"],
     ["collectives/shared.py", "memory/reduction.py"]),
    ("=buckets", 3,
     ["their buckets, in the same", "memory; between hosts by", "messages"], ["transport/mpi.py"]),
    ("step", 0, ["optimizer.step()"], []),
    ("=wait", 1, ["waits for what is not over:", "p.grad has the mean"],
     ["torch/averaging.py", "engine/handle.py"]),
)
GRADIENT_ARROWS = (
    ("backward", "ready"), ("ready", "full"), ("full", "schedule"), ("schedule", "queued"),
    ("queued", "stepped"), ("stepped", "agreed"), ("agreed", "calls", "both"),
    ("agreed", "combined"), ("combined", "buckets", "both"), ("step", "wait"),
)
GRADIENT_LANES = ("PyTorch", "mpiring, in your thread", "mpiring's own thread", "other ranks")


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
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
           f'viewBox="0 0 {width} {height}">', f"<style>{STYLE}</style>",
           '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
           'markerHeight="7" orient="auto-start-reverse"><path d="M0 0 L8 4 L0 8 z" '
           'fill="#2f6f9f"/></marker></defs>',
           f'<rect width="{width}" height="{height}" fill="#ffffff"/>']
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


def _arrow(first, second, kind=""):
    (x1, y1, height1, *_), (x2, y2, height2, *_) = first, second
    if x1 == x2:
        ends = x1 + BOX / 2, y1 + height1, x2 + BOX / 2, y2
    else:
        y = max(y1, y2) + min(height1, height2) / 2
        ends = (x1 + BOX, y, x2, y) if x1 < x2 else (x1, y, x2 + BOX, y)
    return '<path class="{}" d="M{} {} L{} {}"/>'.format(f"arrow {kind}".strip(), *ends)


PICTURES = {"gradient.svg": (GRADIENT_LANES, GRADIENT, GRADIENT_ARROWS)}

if __name__ == "__main__":
    for file, sheet in PICTURES.items():
        (FOLDER / file).write_text(picture(*sheet))
