"""One module a command, with a dataclass ``Arguments`` and a function ``run``; ``weights`` is what several of them share."""

COMMANDS: dict[str, str] = {
    "demo": "three runs on built-in images that show the point in minutes",
    "train": "pretrain an encoder on images, or continue a run",
    "evaluate": "kNN, linear probe, fine-tuning: numbers with their protocol",
    "evaluate-coco": "Mask R-CNN on COCO from an encoder: box and mask AP",
    "report": "one HTML page about runs: curves, verdicts, differences",
    "embed": "write the embeddings of images",
    "export": "weights for torchvision, timm, Detectron2, ONNX, each loaded back",
    "views": "look at the views of your images, and at what each policy does to them",
    "graph": "show a view graph: its views, edges, weights, cost, and a picture",
    "data": "look at a source of images, pack it, or fetch CIFAR-10",
    "reproduce": "the paper's tables and figures at three scales (table 4: pretraining only)",
    "doctor": "what this machine has, what works, and how long a run would take",
    "completion": "print a script that completes commands and flags in the shell",
}


def module_name(command: str) -> str:
    return command.replace("-", "_")
