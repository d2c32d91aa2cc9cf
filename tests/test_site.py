"""The documentation as a site: it is built, its links lead somewhere, and its search finds what readers type."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

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
