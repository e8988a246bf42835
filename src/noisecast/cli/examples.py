"""What a newcomer would type: the end of each command's own help."""

EXAMPLES = {
    "demo": ["noisecast demo", "noisecast demo --output somewhere"],
    "train": [
        "noisecast train people.csv --label answer --bounds bounds.toml \\",
        "    --batch-size 64 --epochs 20 --target-epsilon 1 --output model",
        "noisecast train reviews.csv --text text --label label --test-fraction 0.2 \\",
        "    --optimizer dp-adam --learning-rate 0.1 --l2-clip-norm 0.5 \\",
        "    --batch-size 64 --epochs 100 --target-epsilon 1 --output model",
    ],
    "predict": [
        "noisecast predict model new.csv --output predictions.csv",
        "noisecast predict model new.csv --label answer    # and how many are right",
    ],
    "answer": ["noisecast answer examples/quadratic.toml --figure quadratic.png"],
    "forecast": [
        "noisecast forecast examples/forecast.toml             # a grid",
        "noisecast forecast examples/forecast.toml --best      # best rates and clips",
        "noisecast forecast examples/quadratic.toml --crossing # the better optimizer",
    ],
    "accuracy": ["noisecast accuracy examples/forecast.toml --seeds 16 --figure accuracy.png"],
    "sweep": [
        "noisecast sweep examples/sweep.toml --store tries --estimate",
        "noisecast sweep examples/sweep.toml --store tries",
    ],
    "results": [
        "noisecast results tries",
        'noisecast results tries --sql "select optimizer, min(value) from results',
        "    where metric = 'test_loss' and step = num_steps group by all\"",
    ],
    "select": [
        "noisecast select tries --metric test_loss --price public \\",
        '    --reason "a data set that anyone may download"',
        "noisecast select tries --metric test_loss --price compose",
    ],
    "protocol": ["noisecast protocol b examples/sweep.toml --store levels --metric test_loss"],
    "advise": [
        "noisecast advise examples/advise.toml --epsilon 0.5,1,2,8 --public",
        "noisecast advise --numbers examples/advise_numbers.toml",
    ],
    "report": ["noisecast report tries -o report.html", "noisecast report model -o model.html"],
    "account": [
        "noisecast account --num-examples 25000 --batch-size 64 --num-steps 39000 \\",
        "    --target-delta 1e-5 --noise-multiplier 1",
        "noisecast account --num-examples 25000 --batch-size 64 --epochs 100 \\",
        "    --target-delta 1e-5 --target-epsilon 1",
    ],
    "ledger": [
        "noisecast ledger budget privacy.ledger people --epsilon 3 --delta 1e-5",
        "noisecast ledger show privacy.ledger",
    ],
    "audit": ["noisecast audit", "noisecast audit --engine row_sparse --optimizer dp-sgd"],
    "reproduce": ["noisecast reproduce", "noisecast reproduce fig-stationary"],
    "datasets": ["noisecast datasets"],
}  # of every command; a line that ends in a backslash, or a quote that is open, goes on in the next


def examples_of(command: str) -> str:
    """As they stand below a command's help."""
    return "\n".join(["Examples:", *(f"  {line}" for line in EXAMPLES[command])])
