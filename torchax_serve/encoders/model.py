from torchax_serve.model import ServedModel
class EncoderModel(ServedModel): pass
