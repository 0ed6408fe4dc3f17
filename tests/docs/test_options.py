from options_page import PAGE, page


def test_the_page_of_options_is_up_to_date():
    assert PAGE.read_text() == page()
    assert "| `embed_dim` | `768` | D, width of every token. |" in page()
    assert "(`pre`, `post`)" in page()
