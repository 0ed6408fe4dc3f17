from equation_lines import PAGE, ROW, corrected


def test_every_line_number_in_the_equations_page_is_true():
    page = PAGE.read_text()
    assert corrected(page) == (page, [])
    rows = [
        line for line in page.splitlines() if line.count(" | ") >= 3 and "---" not in line and "where |" not in line
    ]
    assert len(rows) > 25
    for row in rows:
        assert ROW.search(row), f"no code and link in: {row}"


def test_a_wrong_number_is_found_and_corrected():
    page = PAGE.read_text()
    row = ROW.search(page)
    number = int(row["line"])
    wrong = page.replace(f"{row['file']}:{number}]", f"{row['file']}:{number + 1}]", 1)
    mended, problems = corrected(wrong)
    assert mended == page
    assert problems == [f"{row['code']!r} is in line {number} of {row['file']}, not {number + 1}"]
    lost = wrong.replace(row["code"], "no such code", 1)
    assert "'no such code' does not stand" in corrected(lost)[1][0]
