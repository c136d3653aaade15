"""Cut a sentence into syntactic chunks: what `synst` learns to predict.

A sentence has a tree. Its leaves are tokens, and a word may have several of them. A chunk is a node
of the tree: its label, and how many tokens it spans. Chunks are read off from the top:

    chunks(node) = [node]                                 if it has at most k tokens, or one word
                 = the chunks of its children, in order   otherwise

So k = 1 gives a chunk for each word, and a large k gives the sentence alone.

The trees of captions come from `GermanChunker`. It is no parser: it knows closed lists of function
words, that German nouns begin with a capital, and a few rules of which word opens which phrase.
"""

from collections.abc import Sequence
from typing import NamedTuple

from tinyspec.lm.tokenizer import Tokenizer

PHRASES = ("S", "CL", "NP", "PP", "VP", "CJ", "PU")
"""Sentence, clause; phrases led by a noun, a preposition, a verb; conjunction, punctuation."""

WORD_CLASSES = ("DET", "PREP", "PRON", "AUX", "CONJ", "PUNCT", "NOUN", "WORD")
LABELS = (*PHRASES, *WORD_CLASSES)

CLOSED = {
    "DET": """ein eine einem einen einer eines der die das dem den des kein keine keinen keinem
        ihr ihre ihrem ihren ihrer ihres sein seine seinem seinen seiner seines dieser diese dieses
        diesem diesen jeder jede jedes beide alle viele einige mehrere zwei drei vier fünf sechs
        sieben acht neun zehn""",
    "PREP": """in im ins an am ans auf aus bei beim mit nach von vom vor zu zum zur über unter
        neben hinter zwischen durch für gegen ohne um bis seit entlang gegenüber""",
    "PRON": "er sie es ihm ihn ihnen sich man jemand jemanden etwas nichts wir uns ich du",
    "AUX": """ist sind war waren wird werden wurde wurden hat haben hatte hatten kann können will
        wollen soll sollen muss müssen""",
    "CONJ": "und oder aber sowie während als dass wobei wie wenn damit weil da denn sondern ob",
}
CLASS_OF = {word: name for name, words in CLOSED.items() for word in words.split()}
OPENS = {"DET": "NP", "NOUN": "NP", "PREP": "PP", "PRON": "NP", "AUX": "VP", "CONJ": "CJ"}
OPENS |= {"PUNCT": "PU", "WORD": "VP"}
PUNCTUATION = frozenset('.,!?;:"')

Chunk = tuple[str, int]
"""A label, and a number of tokens."""


class Tree(NamedTuple):
    """A constituent.

    leaves    tokens that it spans
    children  constituents in order; a word has none
    """

    label: str
    leaves: int
    children: tuple["Tree", ...] = ()


def join_trees(label: str, children: Sequence[Tree]) -> Tree:
    """Return the constituent that spans these."""
    return Tree(label, sum(child.leaves for child in children), tuple(children))


def cut_tree(tree: Tree, k: int) -> list[Chunk]:
    """Return the chunks of a tree, each of at most k tokens or of one word.

    >>> words = Tree("DET", 1), Tree("NOUN", 2)
    >>> sentence = join_trees("S", [join_trees("NP", words), Tree("WORD", 1)])
    >>> cut_tree(sentence, 3), cut_tree(sentence, 1)
    ([('NP', 3), ('WORD', 1)], [('DET', 1), ('NOUN', 2), ('WORD', 1)])
    """
    only = tree
    while len(only.children) == 1:
        only = only.children[0]
    if tree.leaves <= k or not only.children:
        return [(tree.label, tree.leaves)]
    return [chunk for child in tree.children for chunk in cut_tree(child, k)]


class GermanChunker:
    """Give German token ids a flat tree: sentence, clauses, phrases, words."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        self._texts = dict[int, str]()
        self._classes = dict[tuple[int, ...], str]()

    def parse(self, ids: Sequence[int]) -> Tree:
        """Return the tree of a sentence of at least one token."""
        clauses, phrases, words = list[Tree](), list[Tree](), list[Tree]()
        name, has_noun = "", False  # of the phrase that is open

        def end_phrase() -> None:
            if words:
                phrases.append(join_trees(name, words))
                words.clear()

        def end_clause() -> None:
            end_phrase()
            if phrases:
                clauses.append(join_trees("CL", phrases))
                phrases.clear()

        for word in self.split_words(ids):
            kind = self.classify(word)
            if kind == "CONJ":
                end_clause()
            stays = {
                "DET": name == "PP" and not has_noun,
                "PRON": name == "PP" and not has_noun,
                "NOUN": name in ("NP", "PP"),
                "WORD": name == "VP" or (name in ("NP", "PP") and not has_noun),
            }
            if not (words and stays.get(kind, False)):
                end_phrase()
                name, has_noun = OPENS[kind], False
            words.append(Tree(kind, len(word)))
            has_noun = has_noun or kind in ("NOUN", "PRON")
            if kind == "PUNCT":
                end_clause()
        end_clause()
        return join_trees("S", clauses)

    def split_words(self, ids: Sequence[int]) -> list[tuple[int, ...]]:
        """Return the tokens of each word. It begins at a space, and before and after each mark."""
        words = list[list[int]]()
        is_open = False
        for token in ids:
            text = self._text_of(token)
            is_mark = bool(text.strip()) and set(text.strip()) <= PUNCTUATION
            if is_open and not is_mark and not text.startswith(" "):
                words[-1].append(token)
            else:
                words.append([token])
            is_open = not is_mark
        return [tuple(word) for word in words]

    def classify(self, word: tuple[int, ...]) -> str:
        """Return the class of a word, one of WORD_CLASSES."""
        if word not in self._classes:
            text = self.tokenizer.decode(word).strip()
            if text and set(text) <= PUNCTUATION:
                kind = "PUNCT"
            else:
                kind = CLASS_OF.get(text.lower(), "NOUN" if text[:1].isupper() else "WORD")
            self._classes[word] = kind
        return self._classes[word]

    def _text_of(self, token: int) -> str:
        """Return the text of a token, with the space that begins it."""
        if token not in self._texts:
            piece = self.tokenizer.backend.id_to_token(token) or ""
            self._texts[token] = piece.replace("Ġ", " ")
        return self._texts[token]
