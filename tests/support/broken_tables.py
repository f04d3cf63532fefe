"""Wrong CSV tables and options of `fedshift diagnose`, with their messages."""

from __future__ import annotations

from support.broken_inputs import Broken

TABLE_CASES = (
    Broken(
        "diagnose ragged counts",
        3,
        "c.csv, line 2: 3 cells; the first row has 4",
        counts="client,cat,dog,owl\na,10,20\nb,0,5,5\n",
    ),
    Broken(
        "diagnose negative count",
        3,
        'c.csv, line 2, column 3 ("dog"): -20 is out of range; a finite number >= 0 is needed',
        counts="client,cat,dog,owl\na,10,-20,1\nb,0,5,5\n",
    ),
    Broken(
        "diagnose text count",
        3,
        'c.csv, line 2, column 3 ("dog"): "x" is not a number; a number >= 0 is needed.',
        counts="client,cat,dog,owl\na,10,x,1\nb,0,5,5\n",
    ),
    Broken(
        "diagnose nan count",
        3,
        'c.csv, line 2, column 3 ("dog"): "nan" is not a number; a number >= 0 is needed.',
        counts="client,cat,dog,owl\na,10,nan,1\nb,0,5,5\n",
    ),
    Broken(
        "diagnose misspelled label of two",
        3,
        't.csv, line 1: label "dgo" is not among the labels of the counts (cat, dog). Did you mean "dog"? If no client holds it, give the counts a column of zeros for it.',
        counts="client,cat,dog\na,10,20\nb,5,5\n",
        target="cat,dgo\n0.2,0.8\n",
    ),
    Broken(
        "diagnose all zero",
        2,
        "label_counts are all zero: no client has any example to weigh",
        counts="client,cat,dog,owl\na,0,0,0\nb,0,0,0\n",
    ),
    Broken(
        "diagnose doubled label",
        3,
        'c.csv, line 1: label "cat" is given 2 times; give each once',
        counts="client,cat,cat,owl\na,1,2,3\n",
    ),
    Broken(
        "diagnose empty file",
        3,
        "c.csv is empty; the first row must hold the label names",
        counts="",
    ),
    Broken(
        "diagnose header only",
        3,
        "c.csv: a header and no rows; one row per client is needed",
        counts="client,cat,dog,owl\n",
    ),
    Broken("diagnose bytes", 3, "c.csv is not UTF-8 text (byte 0)", counts=b"\xff\xfe\x00\x01"),
    Broken(
        "diagnose target off one",
        2,
        "target sums to 1.1, it must sum to 1 within 1e-6; pass label shares, or --normalise to have it divided by its sum",
        target="cat,dog,owl\n0.2,0.6,0.3\n",
    ),
    Broken(
        "diagnose target of other labels",
        3,
        't.csv, line 1: label "emu" is not among the labels of the counts (cat, dog, owl). If no client holds it, give the counts a column of zeros for it.',
        target="cat,dog,emu\n0.2,0.6,0.2\n",
    ),
    Broken(
        "diagnose negative target",
        3,
        't.csv, line 2, column 1 ("cat"): -0.2 is out of range; a finite number >= 0 is needed',
        target="cat,dog,owl\n-0.2,0.6,0.6\n",
    ),
    Broken(
        "diagnose lam and ess",
        2,
        "give exactly one of lam and ess; got both (--lam 1.0, --ess 0.5)",
        args=("--lam", "1", "--ess", "0.5"),
    ),
    Broken(
        "diagnose ess of zero",
        2,
        "--ess is a fraction of the examples, 0 < ess <= 1; got 0.0",
        args=("--ess", "0"),
    ),
    Broken(
        "diagnose cap",
        2,
        "--cap 0.3 cannot be met: 2 clients with examples could carry 0.6 in all, the weights must sum to 1; use cap >= 0.5",
        args=("--cap", "0.3"),
    ),
    Broken(
        "diagnose target two rows",
        3,
        "t.csv: 2 rows under the label names; a target is exactly one row, or two columns: label,value",
        target="cat,dog,owl\n0.2,0.6,0.2\n1,0,0\n",
    ),
    Broken(
        "diagnose count beyond all bounds",
        2,
        "label_counts[0] has inf examples in all; give 0 where a client has none, else 1e-12 to 1e+18 (counts in another unit will do)",
        counts="client,cat,dog,owl\na,1e308,1e308,0\nb,0,5,5\n",
    ),
    Broken(
        "diagnose lambda next to nothing",
        2,
        "--lam must be 0, from 1e-100 to 1e+100, or inf; got 5e-324: give --lam 0, the limit that it is next to",
        args=("--lam", "5e-324"),
    ),
)
