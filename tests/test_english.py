"""Tests that pages, docstrings, comments and help keep the rules of English, and lists breaks."""

import english
import pytest

# Of each rule a text that breaks it, and one that does not.
SAMPLES = {
    "Clauses": ("What ranks call is compared, takes an hour.\n\nBehind the name is a program.\n\n"
                "Of srun, request cores.\n\nA lost node ends it: else it would restart.\n\n"
                "New; is written in the background.",
                "What is a rank? A process. Of these, one is new: it is written first."),
    "Colons": ("One: two; three.", "One: two, three."),
    "Ends": ("It does that, too.", "It also does that; two things."),
    "Headings": ("# What to mind", "# Limitations"),
    "Length": (31 * "word " + ".", 30 * "word " + "."),
    "Possessives": ("An optimizer of PyTorch's.", "The size of PyTorch's wheel."),
    "Words": ("Calls of mpiring go on beside the file that lies in a folder.\n\n"
              "Options win over these lines.\n\nSlurm takes them along.\n\n"
              "It tests without pause.\n\nOne has to ask again.", "`beside` is code."),
}


@pytest.mark.parametrize("rule", english.rules(), ids=lambda rule: rule.name)
def test_a_rule_tells_bad_from_good(rule):
    bad, good = ([*map(rule.breaks, english.of_page(text))] for text in SAMPLES[rule.name])
    assert all(next(each, None) for each in bad)
    assert not any(next(each, None) for each in good)


def test_all_texts_of_a_module_are_read(tmp_path):
    path = tmp_path / "module.py"
    path.write_text('''"""Where it begins."""

import argparse

# What a comment
# says.
parser = argparse.ArgumentParser(description="whoever")
parser.add_argument("--x", help="of one"
                    " bucket")
parser.add_argument("--y", help="used by f")
parser.add_argument("--z", action="store_true", help="print it")


def f(x):
    """Do it.

    Args:
        x: Of the caller; bytes
            or words.

    An example:

        x = "Where code is, all may be."
    """
''')
    assert [(line, name) for line, name, _ in english.breaks(path)] == [
        (1, "Clauses"), (15, "Entries"), (7, "Words"), (8, "Clauses"), (8, "Entries"),
        (10, "Entries"), (5, "Clauses")]


def test_comments_of_scripts_and_of_programs_on_pages_are_read(tmp_path):
    script, page = tmp_path / "train.sbatch", tmp_path / "page.md"
    script.write_text("""#!/bin/bash
# Submit
# it anew:
#
#   sbatch anew
#
#SBATCH --nodes=2   # of one job
echo "$#" a#b       # ends amid steps
""")
    page.write_text("""A page.

```python
x = 1               # amid
```
```text
# amid
```
""")
    assert [(line, name) for path in (script, page) for line, name, _ in english.breaks(path)] == [
        (2, "Words"), (7, "Clauses"), (8, "Words"), (4, "Words")]


def test_files_that_users_copy_are_read():
    read = {str(path.relative_to(english.ROOT)) for path in english.files([])}
    assert read >= {"slurm/train.sbatch", "examples/train_torch.py", "packaging/Dockerfile",
                    "packaging/mpijob.yaml", "packaging/mpiring.def", ".ci/run", "setup.cfg"}


def test_no_text_breaks_a_rule():
    rules = english.rules()
    broken = [f"{path.relative_to(english.ROOT)}:{line}: {name}: {remedy}"
              for path in english.files([]) for line, name, remedy in english.breaks(path, rules)]
    assert not broken, f"{len(broken)} texts:\n" + "\n".join(broken)
