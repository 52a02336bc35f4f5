"""Cases of torchvision: models of images, dense maps, boxes, videos and flow, and layers of its detectors."""

from __future__ import annotations

import functools

import torch
import torchvision
from torchvision import models, ops

from module_parity.compare import Case

IMAGES = {
    "alexnet": 64,
    "convnext_tiny": 64,
    "densenet121": 64,
    "efficientnet_b0": 64,
    "efficientnet_v2_s": 64,
    "googlenet": 64,
    "inception_v3": 80,
    "maxvit_t": 224,
    "mnasnet0_5": 64,
    "mobilenet_v2": 64,
    "mobilenet_v3_small": 64,
    "mobilenet_v3_large": 64,
    "regnet_x_400mf": 64,
    "regnet_y_400mf": 64,
    "resnet18": 64,
    "resnet50": 64,
    "resnext50_32x4d": 64,
    "shufflenet_v2_x0_5": 64,
    "squeezenet1_0": 64,
    "squeezenet1_1": 64,
    "swin_t": 64,
    "swin_v2_t": 64,
    "vgg11": 64,
    "vgg11_bn": 64,
}
"""Models of images, and the size of the image."""
MAPS = ("deeplabv3_mobilenet_v3_large", "deeplabv3_resnet50", "fcn_resnet50", "lraspp_mobilenet_v3_large")
VIDEOS = ("mc3_18", "r2plus1d_18", "r3d_18", "s3d", "swin3d_t", "mvit_v1_b", "mvit_v2_s")
BOXES = (
    "fasterrcnn_mobilenet_v3_large_320_fpn",
    "fcos_resnet50_fpn",
    "keypointrcnn_resnet50_fpn",
    "maskrcnn_resnet50_fpn",
    "retinanet_resnet50_fpn",
    "ssd300_vgg16",
    "ssdlite320_mobilenet_v3_large",
)


class Raw(torch.nn.Module):
    """What a detector of one stage computes before it selects boxes."""

    def __init__(self, detector):
        super().__init__()
        self.backbone, self.head = detector.backbone, detector.head

    def forward(self, images):
        """Features and what the head says of each."""
        features = list(self.backbone(images).values())
        return self.head(features)


def boxes():
    low = torch.rand(5, 2) * 8
    return torch.cat([torch.zeros(5, 1), low, low + 1 + torch.rand(5, 2) * 6], 1)


def _image(size, number=1):
    return (torch.randn(number, 3, size, size),)


def _made(name, **options):
    return models.get_model(name, weights=None, **options)


def _detector(name):
    size = {} if name.startswith("ssd") else {"min_size": 96, "max_size": 96}
    return _made(name, weights_backbone=None, **size)


def _layers():
    def feature():
        return torch.randn(1, 8, 16, 16)

    fpn = ops.FeaturePyramidNetwork([4, 8], 6)

    def maps():
        return ({"a": torch.randn(1, 4, 16, 16), "b": torch.randn(1, 8, 8, 8)},)

    return {
        "ops.RoIAlign": Case(lambda: ops.RoIAlign(3, 0.5, 2), lambda: (feature(), boxes())),
        "ops.RoIPool": Case(lambda: ops.RoIPool(3, 0.5), lambda: (feature(), boxes())),
        "ops.PSRoIAlign": Case(lambda: ops.PSRoIAlign(2, 0.5, 2), lambda: (feature(), boxes())),
        "ops.DeformConv2d": Case(
            lambda: ops.DeformConv2d(8, 4, 3, padding=1), lambda: (feature(), torch.randn(1, 18, 16, 16))
        ),
        "ops.FeaturePyramidNetwork": Case(lambda: fpn, maps),
        "ops.SqueezeExcitation": Case(lambda: ops.SqueezeExcitation(8, 2), lambda: (feature(),)),
        "ops.StochasticDepth": Case(lambda: ops.StochasticDepth(0.5, "row"), lambda: (feature(),)),
        "ops.DropBlock2d": Case(lambda: ops.DropBlock2d(0.5, 3), lambda: (feature(),)),
        "ops.FrozenBatchNorm2d": Case(lambda: ops.FrozenBatchNorm2d(8), lambda: (feature(),)),
        "ops.Permute": Case(lambda: ops.Permute([0, 2, 3, 1]), lambda: (feature(),)),
        "ops.MLP": Case(lambda: ops.MLP(8, [16, 4], torch.nn.LayerNorm), lambda: (torch.randn(3, 8),)),
    }


def cases():
    """Every case by name."""
    found = {}
    for name, size in IMAGES.items():
        options = {"init_weights": False} if name in ("googlenet", "inception_v3") else {}
        options |= {"aux_logits": True} if options else {}
        found[name] = Case(functools.partial(_made, name, num_classes=10, **options), functools.partial(_image, size))
    small = functools.partial(
        torchvision.models.VisionTransformer,
        32,
        8,
        num_layers=2,
        num_heads=2,
        hidden_dim=32,
        mlp_dim=64,
        num_classes=10,
    )
    found["VisionTransformer"] = Case(small, lambda: _image(32))
    for name in MAPS:
        make = functools.partial(_made, name, weights_backbone=None, num_classes=5)
        found[name] = Case(make, lambda: _image(64))
    for name in VIDEOS:
        frames, size = (16, 224) if name.startswith("mvit") else (16 if name == "s3d" else 4, 64)
        make = functools.partial(_made, name, num_classes=10)
        found[name] = Case(make, lambda frames=frames, size=size: (torch.randn(1, 3, frames, size, size),))
    for name in BOXES:
        found[name] = Case(functools.partial(_detector, name), lambda: ([torch.rand(3, 96, 96)],))
    for name in ("fcos_resnet50_fpn", "retinanet_resnet50_fpn", "ssd300_vgg16", "ssdlite320_mobilenet_v3_large"):
        found[f"{name}, heads"] = Case(lambda name=name: Raw(_detector(name)), lambda: _image(96))
    found["raft_small"] = Case(functools.partial(_made, "raft_small"), lambda: (*_image(128), *_image(128), 2))
    return found | _layers()
