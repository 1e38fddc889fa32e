"""The part of report.html about one's own labels: its figures are those of labels.csv and annotators.csv."""

import re

from crowd.page import part_of_report

HEAD = "file,given,predicted,added,majority,consensus,p_majority_wrong,p_missing,votes\n"
PEOPLE = "annotator,votes,accuracy,low,high,agreement,confusion,times\n<eve>,7,0.5,0.25,0.75,0.6,b for a,3.2\n"


def rows_of(page: str, caption: str) -> list[list[str]]:
    """The cells of the table with this caption."""
    table = re.search(rf"<p[^>]*>{caption}.*?(<table.*?</table>)", page, re.S)[1]
    return [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in re.findall(r"<tr>(.*?)</tr>", table)]


def test_what_the_page_says_of_ones_own_labels():
    table = HEAD + "1,a|b,a,,b,a,0.8,0.1,b:2|a:1\n2,b,b,,b,b,0.1,0.0,b:3\n3,b,a,a,b,a,0.4,0.3,b:1\n"
    page = part_of_report({"labels.csv": table, "annotators.csv": PEOPLE})
    noise = rows_of(page, "Noise by class")
    assert noise[1:] == [
        ["all", "3", "43.3 %", "13.3 %"],
        ["a", "2", "60.0 %", "20.0 %"],
        ["b", "1", "10.0 %", "0.0 %"],
    ]
    assert rows_of(page, "Confusions") == [["", "a", "b"], ["a", "25.0", "75.0"], ["b", "", "100.0"]]
    assert rows_of(page, "Annotators")[1] == ["&lt;eve&gt;", "7", "50.0 % (25.0 to 75.0)", "60.0 %", "b for a (3)"]
    assert rows_of(page, "Labels moved in")[1] == ["b", "a", "1", "1"] and "<eve>" not in page


def test_sets_without_votes_many_classes_and_made_up_sets():
    table = HEAD + "1,a|b,a,,,,,0.5,\n2,b,b,,,,,0.1,\n"
    page = part_of_report({"labels.csv": table})
    assert rows_of(page, "Noise by class")[1] == ["all", "2", "30.0 %"] and "Confusions" not in page
    assert "Annotators" not in page and "No label was moved" in page
    many = HEAD + "".join(f"{k},c{k},c{k},,c{k},c{k},0,0,c{k}:2|c{k + 1}:1\n" for k in range(20))
    assert len(rows_of(part_of_report({"labels.csv": many}), "Confusions")) == 16  # the most frequent, as a list
    assert part_of_report({"labels.csv": "file,given\n1,a\n"}) == ""
