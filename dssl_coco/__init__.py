"""Detection and segmentation on COCO: torchvision's Mask R-CNN fine-tuned from an encoder, scored by pycocotools."""
