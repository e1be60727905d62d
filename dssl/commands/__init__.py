"""One module per command, with a dataclass ``Arguments`` and a function ``run``; ``arguments`` is what they share."""

COMMANDS: dict[str, str] = {
    "demo": "train on built-in images: heavy views with and without collapse, in minutes",
    "train": "pretrain an encoder on images, or resume a run",
    "evaluate": "measure an encoder: kNN, linear probe, fine-tuning",
    "evaluate-coco": "fine-tune Mask R-CNN on COCO from an encoder: box and mask AP",
    "report": "write an HTML page about runs: curves, verdicts, differences",
    "embed": "write the embeddings of images",
    "explore": "look at unlabelled images: map, neighbours, near-duplicates, outliers, what to label first",
    "export": "write weights for torchvision, timm, Detectron2, ONNX or the Hub, verified by loading them back",
    "push": "export an encoder and upload it to the Hugging Face Hub",
    "views": "show the views of your images, and what each policy does to them",
    "graph": "show a view graph: its views, edges, weights, cost, and a picture",
    "data": "inspect a source of images, pack it, or download CIFAR-10",
    "reproduce": "run the paper's tables and figures, at scales from minutes to GPUs",
    "doctor": "check this machine and estimate how long a run would take",
}

TAKE_PLUGINS = frozenset({"train", "evaluate", "embed", "explore", "export", "push", "report", "views"})
"""Commands with --plugin FILE."""

_OF_SIBLINGS = {
    "demo": "dssl_reproduce.demo",
    "evaluate-coco": "dssl_coco.command",
    "reproduce": "dssl_reproduce.command",
}


def module_name(command: str) -> str:
    """The module of a command: a file of this package, or of a sibling of dssl."""
    return _OF_SIBLINGS.get(command, f"dssl.commands.{command}")
