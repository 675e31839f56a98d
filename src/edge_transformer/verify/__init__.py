"""The correctness chain on this machine: every executor, placement and way of feeding a model against another one.

A file for each kind of link; chain.py has their order, record.py what is compared, subject.py the model.
"""
