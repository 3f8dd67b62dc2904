"""Prompts: a template with a place for the answer, and one word per class.

    "{text} It was {mask}."    with 0=terrible, 1=great

A masked model fills the mask. A causal model reads the text before the mask and predicts the next token, so the answer
comes last in its templates. A field may be changed on its way into the template: `{premise:open}` lacks its final
punctuation, `{hypothesis:lower}` begins with a small letter.

The built-in templates and words are those of LM-BFF (Gao et al., 2021) for masked models, which MeZO (Malladi et al.,
2023) uses too, and of MeZO for causal ones; MeZO has none for TREC there, and its SNLI prompt is the one for CB.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from string import Formatter
from typing import Any

from cyber0.errors import ConfigError

MASK = "mask"
SPECS = {"": "as it is", "open": "without its final punctuation", "lower": "with a small first letter"}


@dataclass(frozen=True)
class Template:
    """A prompt with fields for a sample's texts and one place for the answer."""

    text: str

    def __post_init__(self) -> None:
        try:
            parts = [(name, spec, conversion) for _, name, spec, conversion in Formatter().parse(self.text)]
        except ValueError as error:
            raise ConfigError(f"task.template = {self.text!r} can't be read: {error}") from None
        named = [(name, spec or "") for name, spec, _ in parts if name is not None]
        for name, spec in named:
            if not name.isidentifier() or spec not in SPECS or any(conversion for _, _, conversion in parts):
                raise ConfigError(
                    f"task.template = {self.text!r}: fields are written {{name}} or {{name:spec}} with spec "
                    f"{' or '.join(filter(None, SPECS))}, not {{{name}:{spec}}}"
                )
        if "{{" in self.text or "}}" in self.text:
            raise ConfigError(f"task.template = {self.text!r}: braces are for fields alone")
        if [name for name, _ in named].count(MASK) != 1 or "{mask}" not in self.text:
            raise ConfigError(f"task.template = {self.text!r} must have {{mask}} once, where the answer goes")
        if len(named) < 2:
            raise ConfigError(f"task.template = {self.text!r} has no field for the text: write, say, {{text}}")

    @property
    def fields(self) -> list[str]:
        """The names of the sample's texts, in order of appearance."""
        names = [name for _, name, _, _ in Formatter().parse(self.text) if name is not None and name != MASK]
        return list(dict.fromkeys(names))

    def masked(self, sample: Mapping[str, str], mask: str) -> str:
        """Return the prompt for a masked model."""
        return self.text.format_map({name: _Field(value) for name, value in sample.items()} | {MASK: mask})

    def causal(self, sample: Mapping[str, str]) -> str:
        """Return what a causal model reads; the space before the answer belongs to the answer's token."""
        before = self.text[: self._place]
        return before.format_map({name: _Field(value) for name, value in sample.items()}).rstrip(" ")

    @property
    def separator(self) -> str:
        """What a causal model's answer begins with: a space, unless a line begins there."""
        before = self.text[: self._place]
        return " " if before.endswith(" ") else ""

    def check_causal(self) -> None:
        """Refuse a template whose answer comes before the text: a causal model would not have read it."""
        after = self.text[self._place + len("{mask}") :]
        late = [name for _, name, _, _ in Formatter().parse(after) if name]
        if late:
            raise ConfigError(
                f"task.template = {self.text!r} asks for the answer before {{{late[0]}}}, which a causal model has not "
                "read by then: put {mask} last"
            )

    @property
    def _place(self) -> int:
        return self.text.index("{mask}")


class _Field(str):
    """A text that knows how a template may change it."""

    def __format__(self, spec: str) -> str:
        if spec == "open":
            return str(self)[:-1] if self[-1:] in ".!?,;:" else str(self)
        if spec == "lower":
            return str(self)[:1].lower() + str(self)[1:]
        return str(self)


@dataclass(frozen=True)
class Prompt:
    """How a set's samples are put to a model."""

    masked: str
    causal: str
    words: dict[str, str]
    """Label -> word; the order of the labels is that of the classes."""


PROMPTS = {
    "sst2": Prompt("{text} It was {mask}.", "{text} It was {mask}", {"0": "terrible", "1": "great"}),
    "snli": Prompt(
        "{premise:open}? {mask}, {hypothesis:lower}",
        'Suppose {premise} Can we infer that "{hypothesis}"? Yes, No, or Maybe?\n{mask}',
        {"contradiction": "No", "entailment": "Yes", "neutral": "Maybe"},
    ),
    "trec": Prompt(
        "{mask}: {text}",
        "Question: {text}\nType: {mask}",
        {"DESC": "Description", "ENTY": "Entity", "ABBR": "Expression", "HUM": "Human", "LOC": "Location",
         "NUM": "Number"},
    ),
}  # fmt: skip

ALTERNATIVES = {
    "terrible": ("bad", "awful", "poor"), "great": ("good", "excellent", "nice"), "Maybe": ("Perhaps", "Unknown"),
    "Description": ("Reason", "Meaning"), "Entity": ("Thing", "Object"), "Expression": ("Short", "Letters"),
    "Human": ("Person", "Name"), "Location": ("Place", "City"), "Number": ("Count", "Value"),
}  # fmt: skip
COMMON = ("bad", "good", "no", "yes", "A", "B")


def template(name: str, given: str, causal: bool) -> Template:
    """Return the template of a task: what the config gives, else the built-in one for this kind of model."""
    if not given and name not in PROMPTS:
        raise ConfigError(f"task.name = {name!r} needs task.template, for example '{{text}} It was {{mask}}.'")
    found = Template(given or (PROMPTS[name].causal if causal else PROMPTS[name].masked))
    if causal:
        found.check_causal()
    return found


def label_words(name: str, given: str) -> dict[str, str]:
    """Return the word of each label: what the config gives, as 'label=word, label=word', else the built-in ones."""
    if not given:
        if name not in PROMPTS:
            raise ConfigError(f"task.name = {name!r} needs task.label_words, for example '0=terrible, 1=great'")
        return PROMPTS[name].words
    pairs = [part.partition("=") for part in given.split(",")]
    words = {label.strip(): word.strip() for label, _, word in pairs}
    if any(not equals or not label.strip() or not word.strip() for label, equals, word in pairs):
        raise ConfigError(f"task.label_words = {given!r} must be pairs label=word, as '0=terrible, 1=great'")
    if len(words) < len(pairs) or len(set(words.values())) < len(words) or len(words) < 2:
        raise ConfigError(f"task.label_words = {given!r} must give two or more labels, each once and a word of its own")
    return words


def word_tokens(words: Mapping[str, str], tokenizer: Any, template: Template, causal: bool) -> list[int]:
    """Return the token of each word where the answer goes, or refuse words that are more than one token."""
    return [_token(word, tokenizer, template, causal) for word in words.values()]


def _token(word: str, tokenizer: Any, template: Template, causal: bool) -> int:
    pieces = _pieces(word, tokenizer, template, causal)
    if len(pieces) == 1 and pieces[0] != tokenizer.unk_token_id:
        return pieces[0]
    what = "unknown to" if len(pieces) == 1 else f"{len(pieces)} tokens ({_shown(pieces, tokenizer)}) for"
    others = [other for other in ALTERNATIVES.get(word, COMMON) if _fits(other, tokenizer, template, causal)]
    remedy = f"for example {' or '.join(others[:3])}" if others else "a shorter or more common one"
    raise ConfigError(
        f"the label word {word!r} is {what} this model's tokenizer, and an answer is one token; "
        f"set task.label_words with another word, {remedy}"
    )


def _fits(word: str, tokenizer: Any, template: Template, causal: bool) -> bool:
    pieces = _pieces(word, tokenizer, template, causal)
    return len(pieces) == 1 and pieces[0] != tokenizer.unk_token_id


def _pieces(word: str, tokenizer: Any, template: Template, causal: bool) -> list[int]:
    """Return the tokens of a word in its place; the space before it belongs to it, as the models were trained."""

    def tokens(text: str) -> list[int]:
        found: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        return found

    if not causal:
        return tokens(f" {word}")
    prompt = template.causal(dict.fromkeys(template.fields, "It"))
    before, after = tokens(prompt), tokens(prompt + template.separator + word)
    return after[len(before) :] if after[: len(before)] == before else tokens(template.separator + word)


def _shown(pieces: list[int], tokenizer: Any) -> str:
    return ", ".join(repr(tokenizer.decode([piece])) for piece in pieces[:6])
