"""From a request to running ranks: who starts them, with which words, where they meet, and how they end.

`prepare` chooses everything, `local` runs the ranks of this machine and `remote` those of several; `blame` finds the
rank that failed first.
"""
