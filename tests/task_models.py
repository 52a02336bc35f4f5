"""Tiny random models with heads for images, sound and series, in folders with their processors."""

import json

import numpy as np
import torch
import transformers as tf
from encoder_models import tokenizer
from PIL import Image
from weights import draw_matrices

LABELS = {0: "cat", 1: "dog", 2: "mat"}
SIZE = {"height": 32, "width": 32}


def images():
    """Three pictures of two shapes, of smooth random colours."""
    random = np.random.default_rng(0)
    found = []
    for width, height in ((40, 48), (64, 32), (40, 48)):
        small = Image.fromarray(random.integers(0, 255, (6, 6, 3), np.uint8))
        found.append(small.resize((width, height), Image.Resampling.BICUBIC))
    return found


def sounds(rate=16_000, seconds=(0.3, 0.5)):
    """A tone and noise of different lengths, float32[num_samples] each."""
    random = np.random.default_rng(0)
    times = [np.arange(int(rate * each)) / rate for each in seconds]
    return [
        (0.3 * np.sin(440 * (1 + index) * 2 * np.pi * each) + 0.05 * random.normal(size=each.size)).astype(np.float32)
        for index, each in enumerate(times)
    ]


def saved(path, model, *processors):
    """Saves a model with what reads its inputs; returns the model in PyTorch."""
    model.eval()
    torch.manual_seed(0)
    draw_matrices(model, std=0.2)
    for each in (model, *processors):
        each.save_pretrained(path)
    return model


def vit_config(kind=tf.ViTConfig, **options):
    return kind(
        image_size=32,
        patch_size=8,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        **options,
    )


def vit(path):
    return saved(path, tf.ViTForImageClassification(vit_config(id2label=LABELS)), tf.ViTImageProcessor(size=SIZE))


def resnet_config(**options):
    return tf.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 1, 1], layer_type="basic", **options
    )


def detr_config(**options):
    sizes = {"d_model": 32, "encoder_attention_heads": 4, "decoder_attention_heads": 4} | options
    return tf.DetrConfig(
        **sizes,
        backbone_config=resnet_config(out_features=["stage1", "stage2", "stage3", "stage4"]),
        use_timm_backbone=False,
        use_pretrained_backbone=False,
        encoder_layers=1,
        decoder_layers=1,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        num_queries=6,
        id2label=LABELS,
    )


def detr(path):
    return saved(
        path,
        tf.DetrForObjectDetection(detr_config()),
        tf.DetrImageProcessor(size={"shortest_edge": 32, "longest_edge": 64}),
    )


def clip(path):
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    words = {"vocab_size": 40, "max_position_embeddings": 64, "eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 0}
    config = tf.CLIPConfig(
        text_config=sizes | words, vision_config=sizes | {"image_size": 32, "patch_size": 8}, projection_dim=16
    )
    sizes = {"size": {"shortest_edge": 32}, "crop_size": SIZE}
    return saved(path, tf.CLIPModel(config), tf.CLIPImageProcessor(**sizes), tokenizer())


def segformer(path):
    config = tf.SegformerConfig(
        hidden_sizes=[8, 16, 24, 32],
        depths=[1, 1, 1, 1],
        num_attention_heads=[1, 2, 2, 4],
        decoder_hidden_size=16,
        id2label=LABELS,
    )
    return saved(path, tf.SegformerForSemanticSegmentation(config), tf.SegformerImageProcessor(size=SIZE))


def detr_panoptic(path):
    """Finds something in each of its queries."""
    model = tf.DetrForSegmentation(detr_config(d_model=64, encoder_attention_heads=8, decoder_attention_heads=8))
    model.detr.class_labels_classifier.bias.data[-1] = -9  # of no object
    return saved(path, model, tf.DetrImageProcessor(size={"shortest_edge": 32, "longest_edge": 64}))


def glpn(path):
    config = tf.GLPNConfig(
        hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 1, 1], num_attention_heads=[1, 2, 2, 4], decoder_hidden_size=16
    )
    return saved(path, tf.GLPNForDepthEstimation(config), tf.GLPNImageProcessor())


def owlvit(path):
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    words = {"vocab_size": 40, "max_position_embeddings": 16, "eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 0}
    config = tf.OwlViTConfig(
        text_config=sizes | words, vision_config=sizes | {"image_size": 32, "patch_size": 8}, projection_dim=32
    )
    made = tokenizer()
    made.model_max_length = 16
    return saved(path, tf.OwlViTForObjectDetection(config), tf.OwlViTImageProcessor(size=SIZE, crop_size=SIZE), made)


def wav2vec_config(**options):
    return tf.Wav2Vec2Config(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        conv_dim=(16, 16, 16),
        conv_kernel=(10, 3, 2),
        conv_stride=(5, 4, 4),
        num_feat_extract_layers=3,
        num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=4,
        classifier_proj_size=16,
        **options,
    )


def wav2vec(path):
    return saved(
        path,
        tf.Wav2Vec2ForSequenceClassification(wav2vec_config(id2label=LABELS)),
        tf.Wav2Vec2FeatureExtractor(return_attention_mask=False),
    )


def wav2vec_ctc(path):
    """Writes letters of a vocabulary of its own."""
    words = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3, "|": 4} | {
        letter: i for i, letter in enumerate("abcdefgh", 5)
    }
    (path / "vocab.json").write_text(json.dumps(words))
    model = tf.Wav2Vec2ForCTC(wav2vec_config(vocab_size=len(words), pad_token_id=0))
    extractor = tf.Wav2Vec2FeatureExtractor(return_attention_mask=False)
    return saved(path, model, extractor, tf.Wav2Vec2CTCTokenizer(str(path / "vocab.json")))


def vits(path):
    """Speaks letters; two speakers."""
    letters = {letter: index for index, letter in enumerate("_ abcdefghijklmnopqrstuvwxyz'-")}
    (path / "vocab.json").write_text(json.dumps(letters))
    config = tf.VitsConfig(
        vocab_size=len(letters),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        ffn_dim=24,
        flow_size=16,
        spectrogram_bins=17,
        upsample_initial_channel=16,
        upsample_rates=[4, 4],
        upsample_kernel_sizes=[8, 8],
        resblock_kernel_sizes=[3],
        resblock_dilation_sizes=[[1, 3]],
        prior_encoder_num_flows=2,
        prior_encoder_num_wavenet_layers=1,
        posterior_encoder_num_wavenet_layers=1,
        depth_separable_num_layers=1,
        duration_predictor_num_flows=2,
        duration_predictor_filter_channels=16,
        wavenet_dilation_rate=1,
        num_speakers=2,
        speaker_embedding_size=8,
        sampling_rate=16_000,
        pad_token_id=0,
    )
    reader = tf.VitsTokenizer(str(path / "vocab.json"), pad_token="_", unk_token="_", phonemize=False, is_uroman=False)
    return saved(path, tf.VitsModel(config), reader)


def speecht5(path, *, vocoder=True):
    """Speaks words, some frames for each; with its vocoder next to it."""
    sizes = {"hidden_size": 32, "encoder_layers": 1, "decoder_layers": 2, "num_mel_bins": 20}
    sizes |= {f"{part}_attention_heads": 4 for part in ("encoder", "decoder")}
    sizes |= {f"{part}_ffn_dim": 48 for part in ("encoder", "decoder")}
    sizes |= {f"speech_decoder_{part}_units": 24 for part in ("prenet", "postnet")}
    config = tf.SpeechT5Config(
        **sizes, speaker_embedding_dim=12, vocab_size=40, pad_token_id=0,
        max_text_positions=100, max_speech_positions=400,
        conv_dim=(16, 16), conv_stride=(5, 4), conv_kernel=(10, 3),
        num_feat_extract_layers=2, num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=4,
        speech_decoder_postnet_layers=2,
    )  # fmt: skip
    made = tf.SpeechT5HifiGanConfig(
        model_in_dim=20, upsample_initial_channel=16, upsample_rates=[4, 4], upsample_kernel_sizes=[8, 8],
        resblock_kernel_sizes=[3], resblock_dilation_sizes=[[1, 3]],
    )  # fmt: skip
    wave = saved(path / "vocoder", tf.SpeechT5HifiGan(made)) if vocoder else None
    model = tf.SpeechT5ForTextToSpeech(config)
    saved(path, model, tokenizer())
    prenet, end = model.speecht5.decoder.prenet, model.speech_decoder_postnet.prob_out
    for layer in (prenet.final_layer, prenet.speaker_embeds_layer):  # frames and their places change the end
        layer.weight.data *= 4
    prenet.encode_positions.alpha.data[...] = 3
    end.weight.data *= -1
    end.bias.data[:] = -2.1
    model.save_pretrained(path)
    return model, wave


def sam(path):
    """A SAM for images of 64 pixels."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = tf.SamConfig(
        vision_config={
            **sizes, "mlp_dim": 48, "image_size": 64, "patch_size": 8, "output_channels": 32,
            "num_pos_feats": 16, "window_size": 4,
            "global_attn_indexes": [0],
        },
        prompt_encoder_config={
            "hidden_size": 32, "image_size": 64, "patch_size": 8, "image_embedding_size": 8, "mask_input_channels": 4,
        },
        mask_decoder_config={**sizes, "mlp_dim": 48, "iou_head_hidden_dim": 32},
    )  # fmt: skip
    reader = tf.SamImageProcessor(size={"longest_edge": 64}, pad_size={"height": 64, "width": 64})
    return saved(path, tf.SamModel(config), reader)


def timesfm(path):
    """Forecasts 32 values from up to 64."""
    config = tf.TimesFmConfig(
        patch_length=8,
        context_length=64,
        horizon_length=32,
        hidden_size=32,
        intermediate_size=32,
        head_dim=8,
        num_hidden_layers=2,
        num_attention_heads=4,
    )
    return saved(path, tf.TimesFmModelForPrediction(config))
