"""A dump of Wikipedia as segmented text."""

from chimera.data.wikipedia.run import WikipediaProgress, WikipediaResult, segment_wikipedia

__all__ = ["WikipediaProgress", "WikipediaResult", "segment_wikipedia"]
