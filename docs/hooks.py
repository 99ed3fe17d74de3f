"""Bring into the site what its pages link to outside docs/, and examples of docstrings as code."""

import inspect
import re
from pathlib import Path
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pictures, at the path that they have in the repository."""
    pages = "".join(page.content_string for page in files.documentation_pages())
    for path in sorted(set(re.findall(r"!\[[^\]]*\]\(\.\./([^)]+)\)", pages))):
        files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point pictures to their place in the site; of other links outside docs/ keep the text, a path."""
    markdown = re.sub(r"(!\[[^\]]*\])\(\.\./", r"\1(", markdown)
    return re.sub(r"(?<!!)\[([^\]]*)\]\(\.\./[^)]+\)", r"\1", markdown)


class FencedExamples(griffe.Extension):
    """Turns the section `Example:` of a docstring, a session or YAML, into a block of code."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring before it is parsed."""
        if obj.docstring:
            obj.docstring.value = re.sub(r"(?m)^Example:\n((?:    .*\n?|\n)+)", _fence, obj.docstring.value)


def _fence(section: re.Match[str]) -> str:
    code = inspect.cleandoc(section[1])
    return f"**Example**\n\n```{'pycon' if '>>>' in code else 'yaml'}\n{code}\n```\n"
