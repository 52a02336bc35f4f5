"""The corpus of the embedded model: conversations made by rules, in our own words, the same for the same seed."""

from embedded_corpus.conversation import Exchange, is_held_out, normal_form
from embedded_corpus.mix import Conversation, Corpus, hand_written_held_out

__all__ = ["Conversation", "Corpus", "Exchange", "hand_written_held_out", "is_held_out", "normal_form"]
