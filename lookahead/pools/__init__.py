"""Pool files (`lookahead.ngram.pool`) and the tokenizers they belong to: making, opening and describing them."""
