"""The judgement of starts that are known by the words of a log alone: outcome, causes, advice. Pure."""
