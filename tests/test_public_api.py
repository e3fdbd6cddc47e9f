"""Compares what users can import, call, set and type with `public_api.txt`.

A difference is a change for users: it needs a line in CHANGELOG.md. `python
tests/helpers/interface.py` writes the list.
"""

from interface import LIST, public_api
from launching import installed


def test_what_users_rely_on_has_not_changed():
    installed("torch")
    listed, now = LIST.read_text().splitlines(), public_api()
    gone, new = sorted(set(listed) - set(now)), sorted(set(now) - set(listed))
    assert listed == now, "\n".join(["", *(f"- {line}" for line in gone),
                                     *(f"+ {line}" for line in new)])
