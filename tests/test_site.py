"""The documentation as a site: it is built, its links lead somewhere, its search finds what readers type, and its pages
fit a telephone and a wide window, light and dark."""

import html
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.browser import browser
from helpers.browser import needs_browser, violations

ROOT = Path(__file__).resolve().parents[1]

# What readers type, and a page that is among the first three which the search shows.
TYPED = {
    "warm-up": "config",
    "warmup": "synonyms",
    "warmup_steps": "config",
    "lr_schedule.warmup_steps": "config",
    "out of memory": "troubleshooting",
    "OOM": "troubleshooting",
    "bf16": "config",
    "bfloat16": "config",
    "tensor parallel": "synonyms",
    "global_batch": "synonyms",
    "FSDP": "synonyms",
    "ZeRO-3": "config",
    "load_model": "python",
    "api.plan": "python",
    "resume": "tutorial",
    "perplexity": "synonyms",
    "preemption": "synonyms",
    "SFT": "synonyms",
    "loss spike": "troubleshooting",
    "hang": "troubleshooting",
    "slurm": "launchers",
    "lora": "serving",
    "hugging face": "tutorial",
    "GGUF": "commands",
}

# Runs the search of the site, which runs beside the page in a browser, in node. Prints the locations found, by query.
SEARCH = """
const [site, queries] = [process.argv[1], JSON.parse(process.argv[2])];
const fs = require("fs"), vm = require("vm"), workers = site + "/assets/javascripts/workers/";
const [file] = fs.readdirSync(workers).filter(name => /^search\\..*\\.js$/.test(name));
let listen, said;
const world = {console, addEventListener: (_, heard) => listen = heard, postMessage: message => said = message};
world.self = world;
vm.runInNewContext(fs.readFileSync(workers + file, "utf8"), world);
const index = JSON.parse(fs.readFileSync(site + "/search/search_index.json", "utf8"));
const SETUP = 0, QUERY = 2, found = {};
(async () => {
  await listen({data: {type: SETUP, data: {...index, options: {suggest: false}}}});
  for (const query of queries) {
    await listen({data: {type: QUERY, data: query}});
    found[query] = said.data.items.map(page => page[0].location);
  }
  console.log(JSON.stringify(found));
})();
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("mkdocs", reason="needs mkdocs (`make install-dev`)")
    folder = tmp_path_factory.mktemp("site")
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(
        words, cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stderr, done.stderr
    return folder


def test_the_site_is_built_and_its_links_lead_somewhere(site: Path) -> None:
    pages = {path.stem for path in (ROOT / "docs").glob("*.md")} - {"index"}
    assert pages < {path.parent.name for path in site.rglob("index.html")}
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert all(f"{page}.md" in navigation for page in pages)


def test_the_search_index_has_what_readers_type(site: Path) -> None:
    """The pages of TYPED have words that begin with all words of a query, cut at the separator as the search does."""
    index = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))
    separator = re.compile(index["config"]["separator"])
    words: dict[str, set[str]] = {}
    for section in index["docs"]:
        text = re.sub(r"<[^>]*>", " ", f"{section['title']} {section['text']}").lower()
        words.setdefault(section["location"].partition("/")[0], set()).update(separator.split(text))
    assert words.keys() > {path.stem for path in (ROOT / "docs").glob("*.md")} - {"index"}
    for typed, page in TYPED.items():
        for word in separator.split(typed.lower()):
            assert any(each.startswith(word) for each in words[page]), f"{page} has no word {word}"


@pytest.mark.skipif(shutil.which("node") is None, reason="the search is a JavaScript program: needs node")
def test_the_search_finds_what_readers_type(site: Path) -> None:
    done = subprocess.run(["node", "-e", SEARCH, "--", str(site), json.dumps([*TYPED])], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    shown = {typed: [location.partition("/")[0] for location in found[typed][:3]] for typed in TYPED}
    assert not {typed: pages for typed, pages in shown.items() if TYPED[typed] not in pages}


# ---- How pages look: docs/typesetting.py and docs/typesetting.css ----


def read(site: Path, page: str) -> str:
    return (site / page / "index.html").read_text(encoding="utf-8")


def test_pages_ask_no_other_server(site: Path) -> None:
    asked = re.compile(r"<(?:link|script|img|source|iframe)\b[^>]*?(?:href|src)=[\"']?(?:https?:)?//")
    assert not {path for path in site.rglob("*.html") if asked.search(path.read_text(encoding="utf-8"))}
    assert not {
        path for path in site.rglob("*.css") if re.search(r"url\([\"']?(?:https?:)?//|@import", path.read_text())
    }


def test_code_is_shown_as_a_reader_types_it(site: Path) -> None:
    """Code has no backslash before `|`. Names break at their marks, options never after their first hyphens."""
    assert not {path for path in site.rglob("index.html") if re.search(r"<td>[^\n]*\\\|", path.read_text())}
    commands = read(site, "commands")
    assert '<code><span class="option">--to</span> weights|<wbr>torch|<wbr>safetensors</code>' in commands
    assert 'the one that <span class="option">--resume</span> loads' in commands
    megatron = read(site, "from-megatron")
    assert '<span class="option">--num</span>-layers-per-virtual-pipeline-stage</code>' in megatron
    assert "<code>train.<wbr>sequence_length</code>" in read(site, "config")
    assert "data/<wbr>markup.py</code>" in read(site, "features")  # a path has no break before its ending


def test_tables_of_keys_and_options_are_marked(site: Path) -> None:
    """A telephone shows the cells of these tables below each other."""
    found = {}
    for path in (ROOT / "docs").glob("*.md"):
        tables = path.read_text(encoding="utf-8").count("| Default | Meaning |")
        text = read(site, "" if path.stem == "index" else path.stem)
        assert text.count('<div class="reference"><table>') == tables, path
        found[path.stem] = tables
    assert {page for page, tables in found.items() if tables} == {"config", "commands"}
    assert min(found["config"], found["commands"]) > 20


def test_messages_wrap(site: Path) -> None:
    """Each line of what the page of troubleshooting quotes is a block, and its text is that of the page."""
    quoted = re.findall(r"(?ms)^```text\n(.*?)^```", (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8"))
    blocks = re.findall(r'<code>(<span class="message">.*?)</code></pre>', read(site, "troubleshooting"), re.DOTALL)
    assert [html.unescape(re.sub(r"<[^>]*>", "", block)) + "\n" for block in blocks] == quoted
    assert len(quoted) > 5
    assert 'class="message"' not in read(site, "data-format")  # columns stay as they are


def test_pictures(site: Path) -> None:
    """A dark page has the dark picture, and each picture is there in full size. Letters of drawings are legible in the
    358 pixels that a telephone has."""
    for path in site.rglob("index.html"):
        text = path.read_text(encoding="utf-8")
        for source in re.findall(r'<img [^>]*src="([^"#]*figures/[^"#]*\.png)', text):
            assert re.search(rf'<a href="[^"]*figures/[^"]*">(?:<img [^>]*>)?<img [^>]*src="{source}', text), (
                path,
                source,
            )
            assert (path.parent / source).exists()
    tutorial = read(site, "tutorial")
    assert "report-top.png#only-light" in tutorial
    assert "report-top-dark.png#only-dark" in tutorial
    drawings = [*(ROOT / "docs" / "figures").glob("*.svg")]
    assert len(drawings) == 3
    for drawing in drawings:
        text = drawing.read_text(encoding="utf-8")
        (width,) = re.findall(r'<svg [^>]*width="(\d+)"', text)
        assert min(map(float, re.findall(r"([\d.]+)px ", text))) * min(1, 358 / int(width)) > 8.5, drawing
        assert "prefers-color-scheme: dark" in text


@needs_browser
def test_pages_fit_their_window(site: Path) -> None:
    """No page is wider than a telephone or a wide window. In the wide one all tables but the list of presets fit, and
    on the telephone those of keys and options do."""
    wide = "() => document.documentElement.scrollWidth - innerWidth"
    scrolled = """which => [...document.querySelectorAll(which)].filter(each => each.scrollWidth > each.clientWidth)
      .map(each => each.innerText.slice(0, 40))"""
    with browser() as chromium:
        for width, tables in ((1280, "article .md-typeset__scrollwrap"), (390, ".reference .md-typeset__scrollwrap")):
            shown = chromium.new_page(viewport={"width": width, "height": 900})
            for page in sorted(path for path in site.rglob("index.html")):
                shown.goto(page.as_uri())
                assert shown.evaluate(wide) <= 0, (page, width)
                assert [each for each in shown.evaluate(scrolled, tables) if not each.startswith("Preset")] == [], page


@needs_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_of_text(site: Path, scheme: str) -> None:
    """Text, code and links stand out as axe-core asks; links differ from text not by colour alone."""
    with browser() as chromium:
        shown = chromium.new_page(viewport={"width": 1280, "height": 900}, color_scheme=scheme)
        for page in ("tutorial", "comparison", "hooks"):
            shown.goto((site / page / "index.html").as_uri())
            assert violations(shown, "color-contrast", "link-in-text-block") == []
