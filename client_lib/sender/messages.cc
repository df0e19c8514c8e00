#include "client_lib/sender/messages.h"

namespace bellwether::client {

v1::ClientMessage MakeHello(const SenderConfig& config) {
  v1::ClientMessage message;
  v1::Hello* hello = message.mutable_hello();
  hello->set_protocol(kProtocol);
  hello->set_client_version(BELLWETHER_VERSION);
  hello->set_rank(config.rank);
  for (uint32_t kind = 1; kind <= kActionKindMax; ++kind) {
    if ((config.actions_mask >> kind & 1) != 0) hello->add_capabilities(static_cast<v1::ActionKind>(kind));
  }
  hello->set_ranks_agree(config.ranks_agree != 0);
  v1::RunDescription* run = hello->mutable_run();
  run->set_name(config.run);
  run->set_uuid(config.run_uuid, sizeof(config.run_uuid));
  run->set_attempt(config.attempt);
  run->set_launch_unix_ms(config.launch_unix_ms);
  run->set_world(config.world);
  run->set_reporters(config.reporters);
  v1::Layout* layout = run->mutable_layout();
  layout->set_layers(config.layers);
  layout->set_heads(config.heads);
  layout->set_kv_heads(config.kv_heads);
  layout->set_head_dim(config.head_dim);
  layout->set_seq_len(config.seq_len);
  layout->set_experts(config.experts);
  v1::Attention* attention = run->mutable_attention();
  attention->set_kernel(config.attention_kernel);
  attention->set_score_dtype(config.score_dtype);
  attention->set_centred(config.centred != 0);
  attention->set_qk_norm(config.qk_norm != 0);
  attention->set_softcap(config.softcap);
  attention->set_window(config.window);
  attention->set_causal(config.causal != 0);
  run->set_framework(config.framework);
  run->set_model(config.model);
  run->set_weight_decay(config.weight_decay);
  run->set_step_origin(config.step_from_attach != 0 ? v1::STEP_ORIGIN_ATTACH : v1::STEP_ORIGIN_TRAINER);
  return message;
}

v1::ClientMessage MakeBye(v1::ByeReason reason, uint64_t last_seq, const std::string& detail) {
  v1::ClientMessage message;
  message.mutable_bye()->set_reason(reason);
  message.mutable_bye()->set_last_seq(last_seq);
  message.mutable_bye()->set_detail(detail);
  return message;
}

v1::ClientMessage MakeHeartbeat(int64_t time_unix_ns, const LossTotals& losses) {
  v1::ClientMessage message;
  message.mutable_heartbeat()->set_time_unix_ns(time_unix_ns);
  message.mutable_heartbeat()->set_dropped_total(losses.dropped);
  message.mutable_heartbeat()->set_stripped_total(losses.stripped);
  return message;
}

}  // namespace bellwether::client
