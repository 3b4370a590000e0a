"""What a bash script would run, read from its text: nothing is run. The grammar is that of ``tree-sitter-bash``."""

from __future__ import annotations

import operator
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from megatron.pipeline.planner import reading

Node = Any  # of a library that not every installation has
_OPEN, _CLOSE, _SPACE = "\ue000", "\ue001", "\ue002"  # around what is unknown, and in place of blanks within
_MARK = re.compile(f"{_OPEN}([^{_CLOSE}]*){_CLOSE}")
_MOST = 200_000  # steps of a script
_OPERATORS: Mapping[str, Callable[[int, int], int]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "/": lambda a, b: int(a / b), "%": lambda a, b: a - b * int(a / b),
    "**": operator.pow, "<": operator.lt, ">": operator.gt, "<=": operator.le, ">=": operator.ge, "==": operator.eq,
    "!=": operator.ne, "&&": lambda a, b: bool(a and b), "||": lambda a, b: bool(a or b), "-eq": operator.eq, "-ne": operator.ne,
    "-lt": operator.lt, "-le": operator.le, "-gt": operator.gt, "-ge": operator.ge,
}  # fmt: skip
_GROUPS = frozenset("program compound_statement do_group subshell else_clause negated_command ERROR variable_assignments".split())


class Script:
    """A script, followed from its first line to its last as far as its text says what happens.

    Attributes:
        values: of variables, a list for an array.
        commands: the words of those that it would run, in order. What is not known in them is ``unknown``.
        asked: parameters of the command line that decided what runs, and are not known.
        used: names of variables that did, and are not set.
        lost: scripts that it sources, and that are not there.
    """

    def __init__(self, path: Path, given: Mapping[str, str]) -> None:
        """``given``: values of variables, and of parameters by their number, which the script does not change.

        Raises:
            ModuleNotFoundError: there is no tree-sitter.
        """
        import tree_sitter
        import tree_sitter_bash

        self.path, self.given, self.within = path, dict(given), [path.resolve()]
        self.values: dict[str, str | list[str]] = {}
        self.commands: list[list[str]] = []
        self.asked: dict[str, None] = {}
        self.used: dict[str, None] = {}
        self.lost: list[str] = []
        self._out: list[str] = []
        self._steps = 0
        self._parser = tree_sitter.Parser(tree_sitter.Language(tree_sitter_bash.language()))

    def run(self, text: str) -> None:
        """Follow the lines of a text.

        Raises:
            ValueError: it has no end in sight.
        """
        text = re.sub(r"\$([A-Za-z_]\w*)(?=[+*])", r"${\1}", text)  # which the grammar does not split
        self._run(self._parser.parse(text.encode()).root_node)

    # Statements. Their status is False where a test says so, and None where it is not known.
    def _run(self, node: Node) -> bool | None:
        self._steps += 1
        if self._steps > _MOST:
            raise ValueError(f"{self.path}: its loops do not end: give its flags instead")
        if node.type in _GROUPS and node.children[:1] and node.children[0].type == "((":
            return self._arithmetic_test(node.named_children[0])
        if node.type in _GROUPS or node.type == "pipeline":
            status: bool | None = None
            for child in node.named_children:
                status = self._run(child)
            return not status if node.type == "negated_command" and status is not None else status
        return getattr(self, f"_run_{node.type}", self._skip)(node)

    def _skip(self, node: Node) -> None:
        """A statement without words of interest."""

    def _run_list(self, node: Node) -> bool | None:
        left, right = node.named_children[0], node.named_children[-1]
        status = self._run(left)
        if node.children[1].type == "&&":
            return status if status is False else self._run(right)
        return self._run(right) if status is False else status

    def _run_redirected_statement(self, node: Node) -> bool | None:
        body = node.child_by_field_name("body")
        return self._run(body) if body else None

    def _run_if_statement(self, node: Node) -> None:
        if self._branch(node):
            return
        for clause in node.named_children:
            if clause.type == "else_clause" or (clause.type == "elif_clause" and self._branch(clause)):
                if clause.type == "else_clause":
                    self._run(clause)
                return

    def _branch(self, node: Node) -> bool:
        """Run what stands behind ``then`` where the condition holds."""
        then = next(index for index, child in enumerate(node.children) if child.type == "then")
        status = None
        for condition in node.children[1:then]:
            status = self._run(condition) if condition.is_named else status
        for child in node.children[then:] if status else ():
            if child.is_named and child.type not in ("elif_clause", "else_clause"):
                self._run(child)
        return bool(status)

    def _run_while_statement(self, node: Node) -> None:
        *conditions, body = node.named_children
        while all([self._run(one) for one in conditions]):  # a list: all of them run
            self._run(body)

    def _run_for_statement(self, node: Node) -> None:
        name = _text(node.child_by_field_name("variable"))
        for word in self._fields_of(node.children_by_field_name("value")):
            self._set(name, word)
            self._run(node.child_by_field_name("body"))

    def _run_c_style_for_statement(self, node: Node) -> None:
        start, condition, update = (node.child_by_field_name(one) for one in ("initializer", "condition", "update"))
        if start:
            self._arithmetic_test(start)
        while self._arithmetic_test(condition):
            self._run(node.child_by_field_name("body"))
            if self._arithmetic_test(update) is None:
                break

    def _run_case_statement(self, node: Node) -> None:
        value = self._value(node.child_by_field_name("value"))
        for item in node.named_children:
            patterns = [self._value(each) for each in item.children_by_field_name("value")]
            if patterns and not all(each.startswith(("-", "*")) for each in patterns):
                self._known(value)
            if any(fnmatchcase(value, pattern) for pattern in patterns):
                for child in item.named_children[len(patterns) :]:
                    self._run(child)
                return

    def _run_test_command(self, node: Node) -> bool | None:
        if node.children[0].type == "((":
            return self._arithmetic_test(node.named_children[0])
        return self._test(node.named_children[0]) if node.named_children else False

    def _run_declaration_command(self, node: Node) -> None:
        for child in node.named_children:
            self._run(child)

    def _run_variable_assignment(self, node: Node) -> bool | None:
        name, value = node.child_by_field_name("name"), node.child_by_field_name("value")
        adds = any(child.type == "+=" for child in node.children)
        if value is not None and value.type == "array":
            fields = self._fields_of(value.named_children)
            return self._set(_text(name), (self._list(_text(name)) if adds else []) + fields)
        before = self.values.get(_text(name), "") if adds else ""
        return self._set(_text(name), f"{before}{self._value(value) if value is not None else ''}")

    def _run_command(self, node: Node) -> bool | None:
        named = node.child_by_field_name("name")
        if named is None:
            return self._run_declaration_command(node)
        words = self._fields_of([named, *node.children_by_field_name("argument")])
        name, rest = (words[0], words[1:]) if words else ("", [])
        if name in ("true", "false", ":"):
            return name != "false"
        if name == "test":
            tree = self._parser.parse(f"[ {_text(node).split(None, 1)[-1]} ]".encode()).root_node
            return self._run(tree)
        if name in ("source", ".") and rest:
            return self._source(rest[0])
        if name == "printf" and rest[:1] == ["-v"] and len(rest) > 2:
            return self._set(rest[1], _printed(rest[2], rest[3:]))
        if name == "eval":
            return self.run(" ".join(rest))
        self._out.append(self._output(name, rest))
        self.commands.append(words)
        return None

    def _source(self, name: str) -> None:
        """Follow another script; an unknown beginning of its path is taken for the script's own folder."""
        file = (self.path.parent / re.sub(f"^{_OPEN}[^/]*{_CLOSE}/", "", name)).resolve()
        if file.is_file() and file not in self.within:
            self.within.append(file)
            self.run(reading.read_text(file, "a shell script"))
            self.within.pop()
        elif not file.is_file():
            self.lost.append(shown(name))

    def _output(self, name: str, rest: list[str]) -> str:
        """What a command would print, of those that need no machine."""
        words = [word for word in rest if not re.fullmatch("-[A-Za-z]+|--", word)]
        if name == "echo":
            return " ".join(words)
        if name == "printf" and words:
            return _printed(words[0], words[1:])
        if name == "pwd":
            return str(self.path.parent.resolve())
        if name in ("dirname", "basename", "realpath", "readlink") and words:
            path = Path(words[0])
            return str(path.parent if name == "dirname" else path.name if name == "basename" else path)
        if name == "seq" and words and all(word.lstrip("-").isdigit() for word in words):
            first, step, last = (
                [*map(int, words)] if len(words) == 3 else [int((words if len(words) > 1 else ["1"])[0]), 1, int(words[-1])]
            )
            return " ".join(map(str, range(first, last + 1, step)))
        return "" if name == "cd" else unknown(f"$({name})")

    # Tests.
    def _test(self, node: Node) -> bool | None:
        if node.type in ("parenthesized_expression", "negation_expression"):
            return self._test(node.named_children[0])
        if node.type == "unary_expression":
            how, operand = _text(node.children[0]), node.children[-1]
            if how == "!":
                found = self._test(operand)
                return None if found is None else not found
            value = self._known(self._value(operand), asks=how not in ("-z", "-n"))
            if how in ("-f", "-d", "-e"):
                return value is not None and (self.path.parent / value).exists()
            return None if value is None else (not value if how == "-z" else bool(value) if how == "-n" else None)
        if node.type != "binary_expression":
            return bool(self._known(self._value(node)))
        left, how, right = (
            node.child_by_field_name("left"),
            _text(node.child_by_field_name("operator")),
            node.child_by_field_name("right"),
        )
        if how in ("&&", "-a", "||", "-o"):
            both, found = how in ("&&", "-a"), self._test(left)
            return self._test(right) if bool(found) is both else found
        values = [self._known(self._value(side)) for side in (left, right)]
        if None in values:
            return None
        one, other = map(str, values)
        if how in ("=", "==", "!="):
            return fnmatchcase(one, other) is (how != "!=")
        if how == "=~":
            return re.search(other, one) is not None
        try:
            return bool(_OPERATORS[how](int(one), int(other)))
        except (KeyError, ValueError):
            self.used |= dict.fromkeys(_MARK.findall(self._value(left) + self._value(right)))
            return None

    def _known(self, value: str, asks: bool = True) -> str | None:
        """A value in a condition: variables that are not set are empty, as in bash; None where it is not known."""
        names = _MARK.findall(value)
        doubted = [name for name in names if not re.fullmatch(r"[A-Za-z_]\w*", name)]
        if asks:
            self.asked |= dict.fromkeys(name for name in doubted if name.isdigit())
            self.used |= dict.fromkeys(name for name in names if name not in doubted)
        return None if doubted else _MARK.sub("", value)

    # Arithmetic.
    def _arithmetic_test(self, node: Node) -> bool | None:
        found = self._arithmetic_or_none(node)
        return None if found is None else bool(found)

    def _arithmetic_or_none(self, node: Node) -> int | None:
        try:
            return self._arithmetic(node)
        except (ValueError, ArithmeticError):
            return None

    def _arithmetic(self, node: Node) -> int:
        """The result of an expression; ValueError with what is unknown in it."""
        kids = node.named_children
        if node.type in ("binary_expression", "ternary_expression"):
            first = self._arithmetic(kids[0])
            if node.type == "ternary_expression":
                return self._arithmetic(kids[1 if first else 2])
            how = _text(node.child_by_field_name("operator"))
            if how in ("=", "+=", "-="):
                return self._count(kids[0], self._arithmetic(kids[1]) + (0 if how == "=" else first * (1 if how == "+=" else -1)))
            return (
                int(_OPERATORS[how](first, self._arithmetic(kids[1])))
                if how in _OPERATORS
                else self._number(unknown(_text(node)))
            )
        if node.type in ("postfix_expression", "unary_expression", "prefix_expression"):
            value, how = self._arithmetic(kids[0]), _text(next(child for child in node.children if child != kids[0]))
            if how in ("++", "--"):
                self._count(kids[0], value + (1 if how == "++" else -1))
                return value
            return {"-": -value, "!": int(not value)}.get(how, value)
        if node.type in ("parenthesized_expression", "arithmetic_expansion"):
            return self._arithmetic(kids[0])
        if node.type == "variable_assignment":
            return self._count(node.child_by_field_name("name"), self._arithmetic(node.child_by_field_name("value")))
        if node.type in ("variable_name", "word") and not _text(node).isdigit():
            return self._number(self._named(_text(node))[0])
        return self._number(self._value(node))

    def _count(self, name: Node, value: int) -> int:
        self._set(_text(name), str(value))
        return value

    def _number(self, text: str) -> int:
        if not re.fullmatch(r"\s*-?\d+\s*", text) and not _MARK.search(text) and re.fullmatch(r"[\w\s+*/%()-]+", text):
            tree = self._parser.parse(f"$(({text}))".encode()).root_node  # a value that is an expression itself
            return self._arithmetic(tree.named_children[0].named_children[0].named_children[0])
        return int(text)

    # Words.
    def _set(self, name: str, value: str | list[str]) -> None:
        self.values[name] = self.given.get(name, value)

    def _list(self, name: str) -> list[str]:
        value = self.values.get(name, [])
        return list(value) if isinstance(value, list) else [value]

    def _named(self, name: str) -> list[str]:
        """The values of a variable or a parameter; that of one that is not set is unknown."""
        if name in ("@", "*"):
            return [value for key, value in self.given.items() if key.isdigit()]
        if name == "#":
            return [str(len(self._named("@")))]
        if name in ("0", "BASH_SOURCE"):
            return [str(self.path.resolve())]
        value = self.given.get(name, self.values.get(name, os.environ.get(name)))
        return [unknown(name)] if value is None else value if isinstance(value, list) else [value]

    def _fields_of(self, nodes: Sequence[Node]) -> list[str]:
        return [field for node in nodes if node.type != "comment" for field in self._fields(node)]

    def _fields(self, node: Node) -> list[str]:
        """Words that bash makes of one: a value without quotes is split."""
        if node.type in ("command_name",):
            return self._fields_of(node.children)
        if node.type in ("simple_expansion", "expansion", "command_substitution"):
            return [word for value in self._parts(node) for word in re.findall(r"[^ \t\n]+", value)]
        if node.type == "concatenation":
            found: list[str] = []
            for child in node.children:
                first, *rest = self._fields(child) or [""]
                found = [*found[:-1], (found[-1] if found else "") + first, *rest]
            return found
        return self._parts(node)

    def _value(self, node: Node) -> str:
        return " ".join(self._parts(node))

    def _parts(self, node: Node) -> list[str]:
        """Values of a word, none of them split: several of an array alone."""
        text = _text(node).removeprefix("\\\n").lstrip() if node.type.endswith("expansion") else _text(node)
        if node.type == "raw_string":
            return [text[1:-1]]
        if node.type == "string":
            inner = node.children[1:-1]
            if len(inner) == 1 and "@" in _text(inner[0]) and inner[0].type != "string_content":
                return self._parts(inner[0])
            return ["".join(self._quoted(node))]
        if node.type == "concatenation":
            return ["".join(map(self._value, node.children))]
        if node.type == "command_substitution":
            return [self._printed_by(node)]
        if node.type == "arithmetic_expansion":
            try:
                return [str(self._arithmetic(node))]
            except (ValueError, ArithmeticError):
                names = [name for child in _names(node) for name in _MARK.findall(self._named(child)[0])]
                return [unknown(names[0] if names else text)]
        if node.type == "simple_expansion":
            return self._named(text[1:])
        if node.type == "expansion":
            return self._expanded(node)
        return [re.sub(r"\\(\n?)", lambda found: "" if found[1] else "", text)]

    def _quoted(self, node: Node) -> Iterator[str]:
        """Text within double quotes, with the blanks between values, which the grammar leaves out."""
        at = node.start_byte + 1
        for child in node.children[1:]:
            blank = re.match(r"(\s|\\\n)*", _text(child) if child.is_named else "")
            yield node.text[at - node.start_byte : child.start_byte - node.start_byte].decode() + _whole(
                blank[0] if blank else ""
            )
            if child.is_named and child.type != "string_content":
                yield (self._separator if "[*]" in _text(child) else " ").join(self._parts(child))
            elif child.is_named:
                yield _whole(_text(child)[blank.end() if blank else 0 :])
            at = child.end_byte

    @property
    def _separator(self) -> str:
        return str(self.values.get("IFS", " "))[:1]

    def _expanded(self, node: Node) -> list[str]:
        """The values of ``${NAME}``, with a default or a change."""
        target = next((child for child in node.named_children), None)
        if target is None:
            return self._named(_text(node)[2:-1])
        is_part = target.type == "subscript"
        name = _text(target.child_by_field_name("name") if is_part else target)
        values = self._named(name)
        index = _text(target.child_by_field_name("index")) if is_part else "0"
        if is_part and index not in ("@", "*"):
            place = self._arithmetic_or_none(target.child_by_field_name("index"))
            values = values[place : place + 1] if place is not None else [unknown(f"{name}[{index}]")]
        if node.children[1].type == "#":
            return [str(len(values) if is_part else len(values[0]))]
        how = next((_text(child) for child in node.children[2:] if not child.is_named and child.type != "}"), "")
        behind = "".join(self._value(child) for child in node.named_children[1:])
        is_set = values != [unknown(name)] and not (how.startswith(":") and values in ([], [""]))
        if how.lstrip(":") in ("-", "=", "?"):
            if not is_set and how[-1] == "=":
                self._set(name, behind)
            return values if is_set else [unknown(name)] if how[-1] == "?" else [behind]
        if how in (":+", "+"):
            return [behind] if is_set else [""]
        if values == [unknown(name)] and is_part:
            return []  # an array that is not set is empty
        return [unknown(_text(node))] if how else values

    def _printed_by(self, node: Node) -> str:
        """What the commands within ``$(...)`` would print."""
        if any(child.type in ("pipeline", "redirected_statement") for child in node.named_children):
            inner = re.sub(r"\s*(&?>+\S*\s*\S*|2>&1).*", "", _text(node))
            if "cd" not in inner:
                return unknown(f"$({re.split('[ )|`]', inner.lstrip('$(`'))[0]})")
        out, values, commands = self._out, dict(self.values), len(self.commands)
        self._out = []
        for child in node.named_children:
            self._run(child)
        printed = "\n".join(word for word in self._out if word)
        self._out, self.values = out, values
        del self.commands[commands:]
        return printed


def unknown(name: str) -> str:
    """A mark for what is not known without running the script."""
    whole = _MARK.sub(lambda found: found[1], name)
    return f"{_OPEN}{_SPACE.join(whole.split())}{_CLOSE}"


def unknown_in(word: str) -> list[str]:
    """What is not known in a word: names of variables, numbers of parameters, or commands."""
    return [name.replace(_SPACE, " ") for name in _MARK.findall(word)]


def shown(word: str) -> str:
    """A word for people."""
    return _MARK.sub(lambda name: name[1] if name[1].startswith(("$", "`")) else f"${{{name[1]}}}", word).replace(_SPACE, " ")


def _whole(text: str) -> str:
    """Text within double quotes without its backslashes."""
    return re.sub(r'\\([$`"\\\n])', lambda found: found[1].strip("\n"), text)


def _text(node: Node) -> str:
    return str(node.text.decode())


def _names(node: Node) -> Iterator[str]:
    if not node.named_children and node.type in ("variable_name", "word"):
        yield _text(node)
    for child in node.named_children:
        yield from _names(child)


def _printed(form: str, words: Sequence[str]) -> str:
    """What printf makes of words; it begins anew where more are left."""
    form = form.replace("\\n", "\n")
    places = len(re.findall("%[sdi]", form))
    groups = [words[at : at + places] for at in range(0, len(words), places)] if places else [[]]
    return "".join(re.sub("%[sdi]", lambda _, row=iter(group): next(row, ""), form) for group in groups or [[]])
