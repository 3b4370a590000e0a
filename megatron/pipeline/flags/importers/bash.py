"""Commands that a bash script would run, read from its text: nothing is run. The grammar is that of ``tree-sitter-bash``."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from megatron.pipeline.planner import reading

Node = Any  # of a library that not every installation has
_MARK = re.compile("\ue000([^\ue001]*)\ue001")  # around what is unknown
_MOST = 20_000  # steps of a script; one also reads 16 letters of text, or 256 of values
_TESTS = {"-eq": "==", "-ne": "!=", "-lt": "<", "-le": "<=", "-gt": ">", "-ge": ">="}
_EXPANSIONS = ("simple_expansion", "expansion", "command_substitution", "arithmetic_expansion")


class Script:
    """A script, followed from its first line to its last as far as its text says what happens.

    A variable that is not set, or a command's output, is a mark in a value: see ``unknown_in``. A condition with one is not
    fulfilled, but for tests that compare words: a variable that is not set is empty there, as in bash.

    Attributes:
        values: of variables, a list for an array.
        commands: the words of those that it would run, in order.
        asked: parameters by number, and variables, that conditions depend on, and that are not known.
        lost: scripts that it sources, and that are not there.
    """

    def __init__(self, path: Path, given: Mapping[str, str]) -> None:
        """``given``: values of variables, and of parameters by their number, which the script does not change.

        Raises:
            ModuleNotFoundError: there is no tree-sitter.
        """
        import tree_sitter
        import tree_sitter_bash

        self.values: dict[str, str | list[str]] = {}
        self.commands: list[list[str]] = []
        self.asked: dict[str, None] = {}
        self.lost: list[str] = []
        self._path, self._given, self._within, self._steps = path, given, {path.resolve()}, 0
        self._parser = tree_sitter.Parser(tree_sitter.Language(tree_sitter_bash.language()))

    def run(self, text: str) -> None:
        """Follow the lines of a text.

        Raises:
            ValueError: it has no end in sight, or a line cannot be read.
        """
        self._count(len(text) >> 4)
        text = re.sub(r"\$([A-Za-z_]\w*)(?=[+*])", r"${\1}", text.replace("${#}", "$#"))  # which the grammar does not split
        self._run(self._parser.parse(text.encode()).root_node)

    def _run(self, node: Node) -> bool | None:
        """Follow a statement; returns what a test says, and None where that is not known."""
        self._count(1)
        try:
            return self._ran(node)
        except (AttributeError, IndexError, RuntimeError, StopIteration, TypeError):  # a node lacks parts, or is too deep
            raise ValueError(f"line {node.start_point[0] + 1} cannot be read as bash: change it, or give flags instead") from None

    def _count(self, steps: int) -> None:
        self._steps += steps
        if self._steps > _MOST:
            raise ValueError("it is too long, or its loops do not end: give its flags instead")

    def _ran(self, node: Node) -> bool | None:
        if node.children and node.children[0].type == "((":
            return bool(self._result(node.named_children[0]))
        run: Callable[[Node], bool | None] | None = getattr(self, f"_run_{node.type}", None)
        return run(node) if run else self._all(node.named_children)

    def _all(self, nodes: Iterable[Node]) -> bool | None:
        status = None
        for node in nodes:
            status = self._run(node) if node.is_named else status
        return status

    def _run_list(self, node: Node) -> bool | None:
        left, how, *_, right = node.children  # with comments between them
        status = self._run(left)
        fails = status is False or (status is None and how.type == "&&" and left.type in ("test_command", "list"))
        return status if fails is (how.type == "&&") else self._run(right)

    def _run_redirected_statement(self, node: Node) -> bool | None:
        return self._run(node.named_children[0])

    def _run_function_definition(self, node: Node) -> None:
        """Nothing: what calls do is not followed."""

    def _run_if_statement(self, node: Node) -> bool:
        """Run what stands behind ``then`` or ``else``, or one of the next branches."""
        then = next(index for index, child in enumerate(node.children) if child.type in ("then", "else"))
        if node.type != "else_clause" and not self._all(node.children[1:then]):
            return any(self._run(child) for child in node.children if child.type.endswith("_clause"))
        self._all(child for child in node.children[then:] if not child.type.endswith("_clause"))
        return True

    _run_elif_clause = _run_else_clause = _run_if_statement

    def _run_test_command(self, node: Node) -> bool | None:
        return self._test(node.named_children[0]) if node.named_children else False

    def _run_for_statement(self, node: Node) -> None:
        for word in self._fields(node.children_by_field_name("value")):
            self._set(_text(node.child_by_field_name("variable")), word)
            self._run(node.child_by_field_name("body"))

    def _run_c_style_for_statement(self, node: Node) -> None:
        start, condition, update, body = map(node.child_by_field_name, ("initializer", "condition", "update", "body"))
        self._result(start)
        while condition is None or self._result(condition):
            self._run(body)
            self._result(update)

    def _run_case_statement(self, node: Node) -> None:
        value = self._value(node.child_by_field_name("value"))
        for item in node.named_children[1:]:
            patterns = [self._value(each) for each in item.children_by_field_name("value")]
            if not all(pattern.startswith(("-", "*")) for pattern in patterns):  # those are options of the script's own
                self._known(value)
            if any(fnmatchcase(value, pattern) for pattern in patterns):
                self._all(item.named_children[len(patterns) :])
                return

    def _run_variable_assignment(self, node: Node) -> None:
        name, value = _text(node.child_by_field_name("name")), node.child_by_field_name("value")
        adds = any(child.type == "+=" for child in node.children)
        if value is not None and value.type == "array":
            before = self.values.get(name, []) if adds else []
            return self._set(name, [*([before] if isinstance(before, str) else before), *self._fields(value.named_children)])
        return self._set(name, f"{self.values.get(name, '') if adds else ''}{self._value(value) if value is not None else ''}")

    def _run_command(self, node: Node) -> bool | None:
        if node.child_by_field_name("name") is None:
            return None
        words = self._fields([*node.child_by_field_name("name").children, *node.children_by_field_name("argument")])
        self.commands.append(words)
        match words:
            case ["true" | "false" as status]:
                return status == "true"
            case ["source" | ".", name, *_]:  # an unknown beginning of its path is taken for the script's own folder
                file = self._path.parent / re.sub("^\ue000[^/]*\ue001/", "", name)
                try:
                    file, found = file.resolve(), file.is_file()
                except (OSError, RuntimeError, ValueError):  # links in a circle, or what cannot be a name
                    found = False
                if not found:
                    self._known(name)
                    self.lost.append(shown(name))
                if found and file not in self._within:
                    self._within.add(file)
                    self.run(reading.read_text(file, "a shell script"))
            case ["printf", "-v", name, form, *rest]:
                self._set(name, re.sub("%[sd]", lambda _: rest.pop(0) if rest else "", form))
            case ["eval", *rest]:
                self.run(" ".join(rest))
        return None

    def _test(self, node: Node) -> bool | None:
        if node.type == "binary_expression":
            return self._compared(*node.children)
        if node.type == "parenthesized_expression":
            return self._test(node.named_children[0])
        if node.type != "unary_expression":
            return bool(self._known(self._value(node)))
        how, value = _text(node.children[0]), node.children[-1]
        if how == "!":
            found = self._test(value)
            return None if found is None else not found
        known = self._known(self._value(value), asks=False)
        return None if known is None or how not in ("-z", "-n") else (known == "") is (how == "-z")  # files are not looked at

    def _compared(self, left: Node, operator: Node, *right: Node) -> bool | None:
        how = _text(operator)
        if how in ("&&", "||", "-a", "-o"):
            found = self._test(left)
            return self._test(right[0]) if bool(found) is (how in ("&&", "-a")) else found
        one, other = self._known(self._value(left)), self._known("".join(map(self._value, right)))
        if one is None or other is None or how == "=~":
            return None
        if how in _TESTS or how in ("<", ">"):
            number = _evaluated(f"{one} {_TESTS.get(how, how)} {other}")
            return None if number is None else bool(number)
        return fnmatchcase(one, other) is (how != "!=")

    def _known(self, value: str, asks: bool = True) -> str | None:
        """A value in a condition, where variables that are not set are empty; None if something else in it is not known."""
        names = unknown_in(value)
        self.asked |= dict.fromkeys(name for name in names if asks and re.fullmatch(r"\w+", name))
        return None if any(not re.fullmatch(r"[A-Za-z_]\w*", name) for name in names) else _MARK.sub("", value)

    def _result(self, node: Node) -> int | None:
        """The result of arithmetic, which may set a variable; None where it is not known, or there is none."""
        if node is None:
            return None
        if node.type == "variable_assignment":
            return self._run(node)
        text = re.sub(r"^(\+\+|--)(\w+)$", r"\2\1", _text(node))
        if changed := re.fullmatch(r"(\w+)\s*([-+])(?:\2|=\s*(.+))", text):  # i++ or i += 2
            self._set(changed[1], str(_evaluated(f"{self._named(changed[1])[0]} {changed[2]} {changed[3] or 1}")))
        return _evaluated(self._expression(node))

    def _expression(self, node: Node) -> str:
        if node.type in _EXPANSIONS[:3] or not node.children:
            text = _text(node)
            return self._value(node) if node.children else self._named(text)[0] if re.fullmatch(r"[A-Za-z_]\w*", text) else text
        return " ".join(self._expression(child) for child in node.children if child.type not in ("$((", "))"))

    def _set(self, name: str, value: str | list[str]) -> None:
        self.values[name] = self._given.get(name, value)

    def _named(self, name: str) -> list[str]:
        """The values of a variable or a parameter; a mark for one that is not set."""
        if name in ("@", "*", "#"):
            rest = [value for key, value in self._given.items() if key.isdigit()]
            return [str(len(rest))] if name == "#" else rest
        value = self._given.get(name, self.values.get(name, os.environ.get(name)))
        values = [_unknown(name)] if value is None else value if isinstance(value, list) else [value]
        self._count(sum(map(len, values)) + len(values) >> 8)
        return values

    def _fields(self, nodes: Sequence[Node]) -> list[str]:
        return [field for node in nodes if node.type != "comment" for field in self._words(node, True)]

    def _value(self, node: Node) -> str:
        return " ".join(self._words(node, False))

    def _words(self, node: Node, split: bool) -> list[str]:
        """Words that bash makes of one; a value without quotes is split."""
        text = re.sub(r"^(\s|\\\n)+", "", _text(node))
        if node.type == "concatenation":
            found = [""]
            for child in node.children:
                first, *rest = self._words(child, split) or [""]
                found = [*found[:-1], found[-1] + first, *rest]
            return found
        if node.type in _EXPANSIONS:
            values = self._expanded(node, text)
            return [word for value in values for word in re.findall(r"[^ \t\n]+", value)] if split else values
        if node.type == "raw_string":
            return [text[1:-1]]
        if node.type == "string":
            inner = node.children[1:-1]
            array = len(inner) == 1 and "@" in _text(inner[0]) and inner[0].type != "string_content"
            return self._words(inner[0], False) if array else ["".join(self._quoted(node))]
        return [re.sub(r"\\(.|\n)", lambda found: found[1].strip("\n"), text)]

    def _quoted(self, node: Node) -> Iterator[str]:
        """Text within double quotes, with the blanks before values, which the grammar counts to these."""
        at, whole = 1, node.text
        for child in node.children[1:]:
            text = _text(child)
            blank = re.match(r"(\s|\\\n)*", text)[0] if child.is_named else ""  # type: ignore[index]
            for part in (whole[at : child.start_byte - node.start_byte].decode(), blank):
                yield part.replace("\\\n", "")
            if child.type == "string_content":
                yield re.sub(r'\\([$`"\\\n])', lambda found: found[1].strip("\n"), text[len(blank) :])
            elif child.is_named:
                yield (str(self.values.get("IFS", " "))[:1] if "[*]" in text else " ").join(self._words(child, False))
            at = child.end_byte - node.start_byte

    def _expanded(self, node: Node, text: str) -> list[str]:
        """The values of ``$NAME``, ``${NAME}`` with a default, ``$((SUM))`` and ``$(echo WORDS)``."""
        if text.startswith("$((") and node.type == "command_substitution":  # as the grammar has it within ${NAME:=...}
            node = self._parser.parse(f"x={text}".encode()).root_node.named_children[0].named_children[1]
        if node.type == "arithmetic_expansion":
            expression = self._expression(node)
            found = _evaluated(expression)
            return [str(found) if found is not None else _unknown(next(iter(unknown_in(expression)), text))]
        if node.type == "command_substitution":
            kept, self.values, before = self.values, dict(self.values), len(self.commands)
            self._all(node.named_children)
            self.values, commands = kept, self.commands[before:]
            del self.commands[before:]
            known = len(commands) == 1 and commands[0][:1] == ["echo"]
            return [" ".join(commands[0][1:]) if known else _unknown(re.split("[ )|`]", text.strip("$(`"))[0], "$({})")]
        target = next(iter(node.named_children))
        index = target.child_by_field_name("index") if target.type == "subscript" else None
        name = _text(target.child_by_field_name("name") if index else target)
        values = self._named(name)
        lacks = values == [_unknown(name)]
        if index and _text(index) not in ("@", "*"):
            place = self._result(index)
            values = values[place : place + 1 or None] if place is not None else [_unknown(text)]
        how = next((_text(child) for child in node.children[2:] if not child.is_named), "}").lstrip(":")
        other = "".join(self._value(child) for child in node.named_children[1:])
        if text.startswith("${#"):
            return [str(len(values if index else values[0]))]
        if how in ("-", "=", "+"):
            if lacks and how == "=":
                self._set(name, other)
            is_usual = lacks or (":" in text and values == [""])
            return [other] if is_usual is (how != "+") else [] if how == "+" else values
        if how not in ("}", "]", "?"):
            return [_unknown(text)]  # a change of the value
        return [] if lacks and index else values


def _evaluated(expression: str) -> int | None:
    """The result of bash's arithmetic of whole numbers, in an expression of at most 1,000 letters."""
    if len(expression) > 1000:
        return None
    text = re.sub(r"(.*)\?(.*):(.*)", r"(\2) if (\1) else (\3)", expression, flags=re.S).replace("/", "//")
    text = re.sub(r"!(?!=)", " not ", text.replace("&&", " and ").replace("||", " or "))
    if not re.fullmatch(r"(?!.*(\*\*|<<|>>))(\d|\s|[-+*/%()<>=!]|\b(and|or|not|if|else)\b)+", text):
        return None
    try:
        found = int(eval(text, {"__builtins__": {}}))
        return found if -(2**63) <= found < 2**63 else None
    except (SyntaxError, TypeError, ArithmeticError, MemoryError):
        return None


def _unknown(name: str, form: str = "{}") -> str:
    """A mark for what is not known without running the script."""
    return f"\ue000{form.format(_MARK.sub(lambda found: found[1], name).strip())}\ue001"


def unknown_in(word: str) -> list[str]:
    """Unknown parts of a word: names of variables, numbers of parameters, or commands as ``$(nproc)``."""
    return _MARK.findall(word)


def shown(word: str) -> str:
    """A word for people."""
    return _MARK.sub(lambda name: name[1] if name[1].startswith("$") else f"${{{name[1]}}}", word)


def _text(node: Node) -> str:
    return str(node.text.decode())
