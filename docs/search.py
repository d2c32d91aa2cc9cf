"""A hook of mkdocs: in the site's search, pages for users come before pages about the library."""

from typing import Any

_FOR_DEVELOPERS = "features.md", "results.md", "architecture.md"  # long pages, in which every word occurs


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Lowers the rank of a page for developers among the results of a search."""
    if page.file.src_uri in _FOR_DEVELOPERS:
        page.meta["search"] = {"boost": 0.3}
    return markdown
