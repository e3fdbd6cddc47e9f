"""Messages between ranks through MPI, and memory that the ranks of a node share."""

from .base import HEADER_BYTES, LANES, Channel, Members, Node, Request, Task, run_together
from .layout import AREAS, AREA_WORDS, HEADER_WORD, LANE_WORDS, Counter
from .node_memory import NodeMemory, SharedNode
from .windows import Windows
