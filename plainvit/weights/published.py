"""Published weights by name: model, recipe, data and image size.

    plainvit weights          plainvit.load("vit_b16_augreg_i21k_i1k_224")

Addresses, licences and parameter counts are those of timm and transformers (tests compare them with the installed
libraries). Accuracies are ImageNet top-1 and ReaL from timm's results files; None if unknown.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Published:
    hub: str
    family: str
    licence: str
    parameters: int  # of the file, its head included
    top1: float | None = None
    real: float | None = None


def _timm(
    name: str, parameters: int, top1: float | None = None, real: float | None = None, licence: str = "apache-2.0"
) -> Published:
    return Published(f"timm/{name}", "timm", licence, parameters, top1, real)


TO_START = {"CPU": "vit_s16_augreg_i21k_i1k_224", "GPU": "vit_b16_augreg_i21k_224"}  # to fine-tune from, for photos
PUBLISHED: dict[str, Published] = {
    # The paper's own: pre-trained on ImageNet-21k, fine-tuned on ImageNet
    "vit_b16_orig_i21k_i1k_224": _timm("vit_base_patch16_224.orig_in21k_ft_in1k", 86_567_656, 81.78, 86.75),
    "vit_b16_orig_i21k_i1k_384": _timm("vit_base_patch16_384.orig_in21k_ft_in1k", 86_859_496, 84.21, 88.40),
    "vit_l32_orig_i21k_i1k_384": _timm("vit_large_patch32_384.orig_in21k_ft_in1k", 306_632_680, 81.51, 85.91),
    "vit_b16_orig_i21k_224": _timm("vit_base_patch16_224.orig_in21k", 85_798_656),
    "vit_l16_orig_i21k_224": _timm("vit_large_patch16_224.orig_in21k", 303_301_632),
    "vit_h14_orig_i21k_224": _timm("vit_huge_patch14_224.orig_in21k", 630_764_800),
    "r50_vit_b16_orig_i21k_i1k_384": _timm("vit_base_r50_s16_384.orig_in21k_ft_in1k", 98_950_952, 84.99, 88.80),
    "vit_b16_google_i21k_i1k_224": Published("google/vit-base-patch16-224", "transformers", "see its page", 86_567_656),
    # AugReg ("How to train your ViT?")
    "vit_ti16_augreg_i21k_i1k_224": _timm("vit_tiny_patch16_224.augreg_in21k_ft_in1k", 5_717_416),
    "vit_s32_augreg_i21k_i1k_224": _timm("vit_small_patch32_224.augreg_in21k_ft_in1k", 22_878_952),
    "vit_s16_augreg_i21k_i1k_224": _timm("vit_small_patch16_224.augreg_in21k_ft_in1k", 22_050_664),
    "vit_b32_augreg_i21k_i1k_224": _timm("vit_base_patch32_224.augreg_in21k_ft_in1k", 88_224_232),
    "vit_b16_augreg_i21k_i1k_224": _timm("vit_base_patch16_224.augreg_in21k_ft_in1k", 86_567_656, 84.53, 88.89),
    "vit_b16_augreg_i21k_i1k_384": _timm("vit_base_patch16_384.augreg_in21k_ft_in1k", 86_859_496),
    "vit_b8_augreg_i21k_i1k_224": _timm("vit_base_patch8_224.augreg_in21k_ft_in1k", 86_576_872),
    "vit_l16_augreg_i21k_i1k_224": _timm("vit_large_patch16_224.augreg_in21k_ft_in1k", 304_326_632),
    "vit_l16_augreg_i21k_i1k_384": _timm("vit_large_patch16_384.augreg_in21k_ft_in1k", 304_715_752, 87.10, 90.22),
    "vit_b16_augreg_i21k_224": _timm("vit_base_patch16_224.augreg_in21k", 102_595_923),
    "vit_l16_augreg_i21k_224": _timm("vit_large_patch16_224.augreg_in21k", 325_690_707),
    "vit_b16_augreg_i1k_224": _timm("vit_base_patch16_224.augreg_in1k", 86_567_656),
    "vit_b16_sam_i1k_224": _timm("vit_base_patch16_224.sam_in1k", 86_567_656),
    "r_vit_ti16_augreg_i21k_i1k_224": _timm("vit_tiny_r_s16_p8_224.augreg_in21k_ft_in1k", 6_337_704),
    "r26_vit_s32_augreg_i21k_i1k_224": _timm("vit_small_r26_s32_224.augreg_in21k_ft_in1k", 36_431_912),
    "r50_vit_l32_augreg_i21k_i1k_384": _timm("vit_large_r50_s32_384.augreg_in21k_ft_in1k", 329_092_136),
    # BiT
    "bit_r50x1_i21k_i1k_448": _timm("resnetv2_50x1_bit.goog_in21k_ft_in1k", 25_549_352, 80.39, 86.46),
    "bit_r101x1_i21k_i1k_448": _timm("resnetv2_101x1_bit.goog_in21k_ft_in1k", 44_541_480),
    "bit_r101x3_i21k_i1k_448": _timm("resnetv2_101x3_bit.goog_in21k_ft_in1k", 387_934_888),
    "bit_r152x2_i21k_i1k_448": _timm("resnetv2_152x2_bit.goog_in21k_ft_in1k", 236_335_208),
    "bit_r152x4_i21k_i1k_480": _timm("resnetv2_152x4_bit.goog_in21k_ft_in1k", 936_533_224, 84.94, 88.57),
    # DeiT and DeiT III
    "deit_ti16_i1k_224": _timm("deit_tiny_patch16_224.fb_in1k", 5_717_416),
    "deit_s16_i1k_224": _timm("deit_small_patch16_224.fb_in1k", 22_050_664),
    "deit_b16_i1k_224": _timm("deit_base_patch16_224.fb_in1k", 86_567_656, 81.98, 86.83),
    "deit_b16_distilled_i1k_224": _timm("deit_base_distilled_patch16_224.fb_in1k", 87_338_192),
    "deit3_s16_i1k_224": _timm("deit3_small_patch16_224.fb_in1k", 22_059_496),
    "deit3_b16_i1k_224": _timm("deit3_base_patch16_224.fb_in1k", 86_585_320),
    "deit3_l16_i21k_i1k_224": _timm("deit3_large_patch16_224.fb_in22k_ft_in1k", 304_374_760),
    # Self-supervised backbones, without a head
    "mae_b16_i1k_224": _timm("vit_base_patch16_224.mae", 85_798_656, licence="cc-by-nc-4.0"),
    "mae_l16_i1k_224": _timm("vit_large_patch16_224.mae", 303_301_632, licence="cc-by-nc-4.0"),
    "mae_h14_i1k_224": _timm("vit_huge_patch14_224.mae", 630_764_800, licence="cc-by-nc-4.0"),
    "dino_s16_i1k_224": _timm("vit_small_patch16_224.dino", 21_665_664),
    "dino_b16_i1k_224": _timm("vit_base_patch16_224.dino", 85_798_656),
    "dinov2_s14_lvd142m_518": _timm("vit_small_patch14_dinov2.lvd142m", 22_056_192),
    "dinov2_b14_lvd142m_518": _timm("vit_base_patch14_dinov2.lvd142m", 86_579_712),
    "dinov2_l14_lvd142m_518": _timm("vit_large_patch14_dinov2.lvd142m", 304_367_616),
}
