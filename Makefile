# Short names for the commands of this project. `make` lists them.
.DEFAULT_GOAL := help
PYTHON ?= python

.PHONY: help test fast lint size words mutants fuzz book notebooks look bench ci
help:  ## list the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "make %-10s %s\n", $$1, $$2}'

test:  ## run all tests (about 35 minutes on two cores with AVX-512, an hour without)
	$(PYTHON) -m pytest -q -n auto

fast:  ## run the tests without the proofs and the slow ones (less than half of that)
	$(PYTHON) -m pytest -q -n auto -m "not (laws or slow)"

lint:  ## check style, layout and types
	ruff check .
	ruff format --check .
	mypy

size:  ## print the code lines of each room
	$(PYTHON) .ci/size.py

words:  ## print how functions are named and docstrings begin
	$(PYTHON) .ci/words.py

mutants:  ## change FILE=tinyspec/... in small ways, one at a time, and see which changes no law catches (needs `pip install cosmic-ray`)
	$(PYTHON) .ci/mutants.py $(FILE)

fuzz:  ## try 10,000 damaged inputs of every class (about 3 minutes on two cores; SEED= repeats a run, INPUTS= changes the number)
	$(PYTHON) -m tests.fuzz $(or $(INPUTS),10000) $(SEED)

book:  ## execute the lessons and bind them as HTML pages
	$(PYTHON) -m tinyspec book

notebooks:  ## write the lessons as executed Jupyter notebooks
	$(PYTHON) -m tinyspec book --notebooks

look:  ## build the book and test in a headless browser that no code is cut (needs Chromium and `.[book,look]`)
	$(PYTHON) -m pytest -q -m book tests/test_book.py

bench:  ## measure all methods on SmolLM2 against plain decoding (fetches the model first)
	$(PYTHON) -m tinyspec models fetch smollm2
	$(PYTHON) -m tinyspec bench --chapter speculative --model smollm2 --rounds 1

ci:  ## do what continuous integration does: fresh clone, fresh environment, everything
	bash .ci/run
