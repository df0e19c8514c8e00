#include "server/model/own_signals.h"

#include <algorithm>
#include <iterator>

#include "absl/strings/str_cat.h"

namespace bellwether::server {
namespace {

struct FieldName {
  std::string_view name;  // folder/* is any name in that folder, folder/*/mean any mean in one.
  PastSide side;
};
// As TRL, verl, OpenRLHF, Megatron and torchtitan have them.  Not what may be of either sign (entropy_loss),
// not what is good on both sides of its middle (importance_sampling_ratio), and not what spreads (reward_std)
// or steers (kl_coef).
constexpr FieldName kFieldNames[] = {
    {"reward", PastSide::kFalls},
    {"rewards", PastSide::kFalls},
    {"rewards/*/mean", PastSide::kFalls},
    {"rlhf_reward", PastSide::kFalls},
    {"score", PastSide::kFalls},
    {"scores", PastSide::kFalls},
    {"accuracy", PastSide::kFalls},
    {"accuracies", PastSide::kFalls},
    {"token_accuracy", PastSide::kFalls},
    {"margin", PastSide::kFalls},
    {"margins", PastSide::kFalls},
    {"vf_explained_var", PastSide::kFalls},
    {"entropy", PastSide::kFalls},
    {"policy_entropy", PastSide::kFalls},
    {"ess", PastSide::kFalls},
    {"rollout_is_eff_sample_size", PastSide::kFalls},
    {"rollout_actor_probs_pearson_corr", PastSide::kFalls},
    {"kl", PastSide::kRises},
    {"k3_kl", PastSide::kRises},
    {"kl_div", PastSide::kRises},
    {"kl_divergence", PastSide::kRises},
    {"kl_loss", PastSide::kRises},
    {"policy_kl", PastSide::kRises},
    {"ppo_kl", PastSide::kRises},
    {"vllm_kl", PastSide::kRises},
    {"approx_kl", PastSide::kRises},
    {"approxkl", PastSide::kRises},
    {"reward_kl_penalty", PastSide::kRises},
    {"chi2", PastSide::kRises},
    {"chi2_token", PastSide::kRises},
    {"chi2_seq", PastSide::kRises},
    {"rollout_probs_diff", PastSide::kRises},
    {"sampling_logp_difference", PastSide::kRises},
    {"clip_ratio", PastSide::kRises},
    {"clip_ratio/*", PastSide::kRises},
    {"ppo_clip_ratio", PastSide::kRises},
    {"cispo_clip_ratio", PastSide::kRises},
    {"clipfrac", PastSide::kRises},
    {"pg_clipfrac", PastSide::kRises},
    {"pg_clipfrac_lower", PastSide::kRises},
    {"vf_clipfrac", PastSide::kRises},
    {"clipped_ratio", PastSide::kRises},
    {"router_z", PastSide::kRisesLate},
    {"router_z_loss", PastSide::kRisesLate},
    {"z_loss", PastSide::kRisesLate},
    {"aux_loss", PastSide::kRisesLate},
    {"load_balancing_loss", PastSide::kRisesLate},
    {"seq_load_balancing_loss", PastSide::kRisesLate},
    {"global_load_balancing_loss", PastSide::kRisesLate},
};

PastSide SideOf(std::string_view name) {
  const auto* const found =
      std::find_if(std::begin(kFieldNames), std::end(kFieldNames), [&](const FieldName& f) { return f.name == name; });
  return found == std::end(kFieldNames) ? PastSide::kNone : found->side;
}

// The last part of a path, which then ends before it.
std::string_view TakeLast(std::string_view* path) {
  const size_t slash = path->rfind('/');
  const std::string_view last = slash == std::string_view::npos ? *path : path->substr(slash + 1);
  *path = path->substr(0, slash == std::string_view::npos ? 0 : slash);
  return last;
}

}  // namespace

bool IsOwnName(std::string_view name) {
  if (name.empty() || name.size() > kOwnNameBytesMax || name[0] < 'a' || name[0] > 'z') return false;
  return std::all_of(name.begin(), name.end(), [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '_' || c == '.' || c == '/' || c == '-';
  });
}

SignalId MatrixOf(const OwnSignal& signal) {
  return signal.merge == Merge::kSum   ? SignalId::kOwnSum
         : signal.merge == Merge::kMax ? SignalId::kOwnMax
                                       : SignalId::kOwnMean;
}

bool HasColumns(const OwnSignal& signal) {
  return OfHeads(signal.granularity) || signal.granularity == Granularity::kExpert;
}

std::string OwnCellName(const OwnSignal& signal, int32_t layer, int32_t head) {
  if (signal.granularity == Granularity::kRun) return signal.name;
  return HasColumns(signal) ? absl::StrCat(signal.name, "[", layer, ",", head, "]")
                            : absl::StrCat(signal.name, "[", layer, "]");
}

PastSide PastOf(std::string_view name) {
  // A mean is of what its folder says: critic/rewards/mean.
  bool has_folder = false;
  for (const std::string_view end : {"/mean", "_mean", "/avg", "_avg"}) {
    if (name.size() <= end.size() || !name.ends_with(end)) continue;
    has_folder = end.front() == '/';
    name.remove_suffix(end.size());
    break;
  }
  std::string_view last = TakeLast(&name);
  const std::string_view folder = TakeLast(&name);
  if (last.starts_with("mean_")) last.remove_prefix(5);
  PastSide side = SideOf(last);
  if (side == PastSide::kNone && has_folder) side = SideOf(std::string(folder) + "/*/mean");
  if (side == PastSide::kNone) side = SideOf(std::string(folder) + "/*");
  // What is a loss is bad when it rises, if at all: TRL's loss/score.
  return side == PastSide::kFalls && folder == "loss" ? PastSide::kNone : side;
}

bool ComparesPolicies(std::string_view name) {
  const auto has = [name](std::string_view part) { return name.find(part) != std::string_view::npos; };
  return has("rollout_probs_diff") || has("rollout_corr/") || has("sampling_logp_difference") || has("vllm_kl");
}

}  // namespace bellwether::server
