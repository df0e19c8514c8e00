#include "bellwether/client.hpp"

int main() {
  bw_client_options options = bellwether::Client::Options();
  options.layers = options.heads = 1;
  options.run = "consumer";
  options.record_path = "cxx17.bwrun";
  bellwether::Client client;
  if (client.Flush(0) != BW_INVALID_ARGUMENT) return 1;
  if (bellwether::Client::Create(options, &client) != BW_OK) return 2;
  bellwether::Client moved = std::move(client);
  if (client || !moved) return 3;
  const float value = 1;
  bw_block block{};
  block.signal = bw_signal_by_name("loss");
  block.layer_count = block.head_count = 1;
  block.values = &value;
  if (moved.Push(1, &block, 1) != BW_OK) return 4;
  return moved.Flush(20000) == BW_OK ? 0 : 5;
}
