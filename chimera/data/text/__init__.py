"""Text files of several forms, compressed or not, read in blocks and cut into documents of sequences."""

from chimera.data.text.blocks import Block, read_blocks
from chimera.data.text.documents import documents_of
from chimera.data.text.options import TextForm, TextOptions, form_of
from chimera.data.text.streams import TextStream, open_text, uncompressed

__all__ = [
    "Block",
    "TextForm",
    "TextOptions",
    "TextStream",
    "documents_of",
    "form_of",
    "open_text",
    "read_blocks",
    "uncompressed",
]
