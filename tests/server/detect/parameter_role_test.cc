// Goal: names of the usual libraries tell the layer and the role of a parameter; others tell nothing wrong.
// Method: names as the libraries give them.

#include "server/detect/parameter_role.h"

#include <gtest/gtest.h>

#include <string_view>

namespace bellwether::server {
namespace {

TEST(ParameterRoleTest, NamesOfLibrariesTellTheRole) {
  struct Case {
    std::string_view name;
    ParameterRole role;
    int32_t layer;
  };
  for (const Case& each : {
           Case{"model.layers.3.self_attn.q_proj.weight", ParameterRole::kScores, 3},
           Case{"model.layers.11.self_attn.o_proj.weight", ParameterRole::kResidual, 11},
           Case{"model.layers.3.self_attn.v_proj.weight", ParameterRole::kOther, 3},
           Case{"model.layers.3.mlp.down_proj.weight", ParameterRole::kResidual, 3},
           Case{"model.layers.3.mlp.experts.6.down_proj.weight", ParameterRole::kResidual, 3},
           Case{"model.layers.3.mlp.gate.weight", ParameterRole::kRouter, 3},
           Case{"model.layers.3.mlp.gate_proj.weight", ParameterRole::kOther, 3},
           Case{"model.layers.3.input_layernorm.weight", ParameterRole::kVector, 3},
           Case{"model.layers.3.self_attn.q_norm.weight", ParameterRole::kVector, 3},
           Case{"model.layers.3.self_attn.q_proj.bias", ParameterRole::kVector, 3},
           Case{"model.embed_tokens.weight", ParameterRole::kHead, -1},
           Case{"lm_head.weight", ParameterRole::kHead, -1},
           Case{"model.norm.weight", ParameterRole::kVector, -1},
           Case{"model.layers.2.self_attn.sinks", ParameterRole::kVector, 2},
           Case{"transformer.h.0.attn.c_attn.weight", ParameterRole::kScores, 0},
           Case{"transformer.h.0.mlp.c_proj.weight", ParameterRole::kResidual, 0},
           Case{"transformer.h.0.ln_1.weight", ParameterRole::kVector, 0},
           Case{"transformer.wte.weight", ParameterRole::kHead, -1},
           Case{"gpt_neox.layers.5.mlp.dense_4h_to_h.weight", ParameterRole::kResidual, 5},
           Case{"decoder.layers.2.self_attention.linear_qkv.weight", ParameterRole::kScores, 2},
           Case{"decoder.layers.2.mlp.linear_fc2.weight", ParameterRole::kResidual, 2},
           Case{"decoder.layers.2.mlp.router.weight", ParameterRole::kRouter, 2},
           Case{"output_layer.weight", ParameterRole::kHead, -1},
           Case{"layers.7.attention.wo.weight", ParameterRole::kResidual, 7},
           Case{"tok_embeddings.weight", ParameterRole::kHead, -1},
       }) {
    EXPECT_EQ(RoleOf(each.name), each.role) << each.name;
    EXPECT_EQ(LayerOf(each.name), each.layer) << each.name;
  }
}

TEST(ParameterRoleTest, UnknownNamesTellNothing) {
  for (const std::string_view name :
       {"", ".", "weight", "encoder.0.weight", "layers.x.weight", "layers", "a.layers."}) {
    EXPECT_EQ(RoleOf(name), ParameterRole::kOther) << name;
    EXPECT_EQ(LayerOf(name), -1) << name;
  }
}

}  // namespace
}  // namespace bellwether::server
