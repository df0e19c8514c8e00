#include "server/detect/parameter_role.h"

#include <algorithm>
#include <cctype>
#include <charconv>
#include <span>
#include <string>
#include <system_error>
#include <vector>

namespace bellwether::server {
namespace {

// What holds layers, each by its number.
constexpr std::string_view kStacks[] = {"layers", "layer", "h", "blocks", "block", "resblocks"};
// Modules, in lower case.
constexpr std::string_view kHeadModules[] = {"lm_head", "output_layer", "output", "head",
                                             "unembed", "wte",          "wpe",    "wcls"};
constexpr std::string_view kResidualModules[] = {
    "o_proj",     "out_proj", "c_proj",   "wo",    "w2", "down_proj",   "down",     "fc2",           "fc_out",
    "linear_fc2", "proj",     "proj_out", "dense", "o",  "linear_proj", "attn_out", "dense_4h_to_h", "ff_out"};
constexpr std::string_view kScoreModules[] = {"q_proj",
                                              "k_proj",
                                              "wq",
                                              "wk",
                                              "query",
                                              "key",
                                              "to_q",
                                              "to_k",
                                              "q_a_proj",
                                              "q_b_proj",
                                              "q",
                                              "k",
                                              "qkv",
                                              "qkv_proj",
                                              "c_attn",
                                              "wqkv",
                                              "linear_qkv",
                                              "kv_a_proj",
                                              "kv_b_proj",
                                              "kv_a_proj_with_mqa",
                                              "linear_q",
                                              "linear_k",
                                              "query_key_value"};
// Whose parts may have numbers for names.
constexpr std::string_view kSequentials[] = {"mlp", "ffn", "ff", "feed_forward", "net"};
constexpr std::string_view kRouterModules[] = {"router", "gate", "wg"};

bool IsOne(std::string_view part, std::span<const std::string_view> of) {
  return std::find(of.begin(), of.end(), part) != of.end();
}

bool Contains(std::string_view text, std::string_view part) { return text.find(part) != std::string_view::npos; }

// Between dots; one at least.
std::vector<std::string_view> PartsOf(std::string_view name) {
  std::vector<std::string_view> parts;
  for (size_t dot = name.find('.'); dot != std::string_view::npos; dot = name.find('.')) {
    parts.push_back(name.substr(0, dot));
    name.remove_prefix(dot + 1);
  }
  parts.push_back(name);
  return parts;
}

}  // namespace

ParameterRole RoleOf(std::string_view name) {
  std::string lower(name);
  for (char& c : lower) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  const std::vector<std::string_view> parts = PartsOf(lower);
  // The module, behind which "weight" or "bias" comes.
  const bool has_kind = parts.size() > 1 && (parts.back().ends_with("weight") || parts.back() == "kernel");
  const std::string_view module = has_kind ? parts[parts.size() - 2] : parts.back();
  if (parts.back().ends_with("bias") || Contains(module, "norm") || module.starts_with("ln") ||
      module.ends_with("scale") || module.ends_with("sink") || module.ends_with("sinks")) {
    return ParameterRole::kVector;
  }
  const auto any = [&parts](std::string_view wanted) {
    return std::find(parts.begin(), parts.end(), wanted) != parts.end();
  };
  if (IsOne(module, kRouterModules) || any("router")) return ParameterRole::kRouter;
  if (IsOne(module, kScoreModules)) return ParameterRole::kScores;
  const bool in_layer = LayerOf(name) >= 0;
  // "output" and "head" of a layer are its own.
  if (!in_layer && (IsOne(module, kHeadModules) || Contains(module, "embed"))) return ParameterRole::kHead;
  if (in_layer && IsOne(module, kResidualModules)) return ParameterRole::kResidual;
  // The second matrix of a Sequential: its first one has the number 0, and what lies between has no matrix.
  const bool behind = module.size() == 1 && module[0] >= '2' && module[0] <= '9';
  if (in_layer && behind && parts.size() > 2 && IsOne(parts[parts.size() - 3], kSequentials)) {
    return ParameterRole::kResidual;
  }
  return ParameterRole::kOther;
}

bool IsEmbedding(std::string_view name) {
  return Contains(name, "emb") || Contains(name, "wte") || Contains(name, "wpe");
}

int32_t LayerOf(std::string_view name) {
  const std::vector<std::string_view> parts = PartsOf(name);
  for (size_t i = 1; i < parts.size(); ++i) {
    if (!IsOne(parts[i - 1], kStacks)) continue;
    int32_t layer = -1;
    const char* const end = parts[i].data() + parts[i].size();
    const auto [at, error] = std::from_chars(parts[i].data(), end, layer);
    if (error == std::errc() && at == end && layer >= 0) return layer;
  }
  return -1;
}

}  // namespace bellwether::server
