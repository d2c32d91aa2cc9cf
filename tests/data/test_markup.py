"""The visible text of HTML pages, read in chunks of any size."""

import pytest

from optimus.data.markup import page_text

PAGE = """\ufeff<!DOCTYPE html>
<html><head><title>A  page</title><style>p { color: red }</style>
<script>if (a < b) document.write("<p>no</p>")</script></head>
<body><![if !IE]><![odd thing]><!-- not this -->
<h1>Fish &amp; chips</h1><p>One <b>bold</b>
word&nbsp;and a link<a href="x">ed</a> one.<br/>A line<br>and another.</p>
<ul><li>first</li><li>second</ul>
<table><tr><td>a</td><td>b</td></tr><tr><td>1 &lt; 2</td></tr></table>
<pre>def f():
    return 1</pre><template><p>hidden</p></template>5 < 6 ends"""
TEXT = """A page

Fish & chips

One bold word\xa0and a linked one.
A line
and another.

first
second

a\tb
1 < 2

def f():
    return 1

5 < 6 ends"""


@pytest.mark.parametrize("size", [1, 7, 100, 10_000])
def test_page(size: int) -> None:
    assert "".join(page_text(PAGE[start : start + size] for start in range(0, len(PAGE), size))) == TEXT


@pytest.mark.parametrize("page", ["", " \n ", "<script>var a = 1", "<p></p>", "<style>x</style>"])
def test_pages_without_text(page: str) -> None:
    assert "".join(page_text([page])) == ""


def test_references_without_a_character() -> None:
    assert "".join(page_text(["<p>a</p>&#1;<p>b&#1;</p><pre>&#2;</pre>c"])) == "a\n\nb\n\nc"
