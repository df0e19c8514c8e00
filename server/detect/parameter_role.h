// parameter_role.h: where in a model a parameter is, and what it does there, by its name.
//
// Names are those that PyTorch, transformers, Megatron-Core, nanoGPT and torchtitan give:
// "model.layers.3.self_attn.o_proj.weight", "transformer.h.3.mlp.c_proj.weight".  What is not known is kOther: a
// finding then says less, and is none the less right.
//
// Pure functions; safe from any thread.

#ifndef BELLWETHER_SERVER_DETECT_PARAMETER_ROLE_H_
#define BELLWETHER_SERVER_DETECT_PARAMETER_ROLE_H_

#include <cstdint>
#include <string_view>

namespace bellwether::server {

enum class ParameterRole : uint8_t {
  kOther,
  kVector,    // A bias, a norm's gain, or the sinks of attention.
  kRouter,    // Of a mixture of experts.
  kScores,    // Makes queries or keys, also together with values.
  kResidual,  // The last matrix of a block, whose output is added to the residual stream.
  kHead,      // The output layer, or an embedding.
};

ParameterRole RoleOf(std::string_view name);

// Whether it is an embedding, by its name.  One that is the output layer as well has no other.
bool IsEmbedding(std::string_view name);

// The layer that a parameter is of; -1: of none, or none that its name tells.
int32_t LayerOf(std::string_view name);

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_DETECT_PARAMETER_ROLE_H_
