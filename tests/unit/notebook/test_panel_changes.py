"""What is sent of a part: all of it when its structure is new, else the texts and values that differ."""

from __future__ import annotations

from openclaw_nb.notebook.panel_changes import PartChanges


def test_texts_and_values_are_told_by_place_until_the_structure_changes() -> None:
    part = PartChanges()
    part.take('<p title="a">one</p><p>two</p>')
    assert (part.base, part.changes) == ('<p title="a">one</p><p>two</p>', [])
    part.take('<p title="b">one</p><p>three</p>')
    part.take('<p title="b">1</p><p>two</p>')
    assert part.base == '<p title="a">one</p><p>two</p>'
    # The last has changed back: who knows only the drawing before must hear of it.
    assert part.changes == [(0, '<p title="b">'), (1, "1"), (4, "two")]
    part.take('<p class="b">1</p><p>two</p>')
    assert (part.base, part.changes) == ('<p class="b">1</p><p>two</p>', [])


def test_a_part_comes_and_goes() -> None:
    part = PartChanges()
    part.take("<p>one</p>")
    part.take("")
    assert (part.base, part.changes) == ("", [])
    part.take("<p>one</p>")
    assert (part.base, part.changes) == ("<p>one</p>", [])
