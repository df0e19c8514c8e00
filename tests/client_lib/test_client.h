// test_client.h: a bw_client of a small model, and frames for it.

#ifndef BELLWETHER_TESTS_CLIENT_LIB_TEST_CLIENT_H_
#define BELLWETHER_TESTS_CLIENT_LIB_TEST_CLIENT_H_

#include <cstdint>
#include <string>
#include <vector>

#include "bellwether/client.h"
#include "gtest/gtest.h"

namespace bellwether::client {

struct TestClientOptions {
  std::string run = "test";
  std::string server;
  std::string record_path;
  std::string log_path = "/dev/null";
  std::string token_file;
  std::string tls_ca, tls_cert, tls_key;
  std::string spool_dir;
  uint64_t spool_bytes = 0;
  uint32_t layers = 4, heads = 8, kv_heads = 2, ring_frames = 0, attempt = 0, actions_mask = 0, ranks_agree = 0;
};

inline bw_client_options Options(const TestClientOptions& o) {
  const auto text = [](const std::string& s) { return s.empty() ? nullptr : s.c_str(); };
  bw_client_options options{};
  options.struct_size = sizeof(options);
  options.layers = o.layers;
  options.heads = o.heads;
  options.kv_heads = o.kv_heads;
  options.ring_frames = o.ring_frames;
  options.attempt = o.attempt;
  options.actions_mask = o.actions_mask;
  options.ranks_agree = o.ranks_agree;
  options.run = text(o.run);
  options.server = text(o.server);
  options.record_path = text(o.record_path);
  options.log_path = text(o.log_path);
  options.token_file = text(o.token_file);
  options.tls_ca = text(o.tls_ca);
  options.tls_cert = text(o.tls_cert);
  options.tls_key = text(o.tls_key);
  options.spool_dir = text(o.spool_dir);
  options.spool_bytes = o.spool_bytes;
  options.sender_path = BELLWETHER_SENDER;
  return options;
}

class TestClient {
 public:
  explicit TestClient(const TestClientOptions& o) {
    const bw_client_options options = Options(o);
    EXPECT_EQ(bw_client_create(&options, &client_), BW_OK) << bw_last_error();
  }
  ~TestClient() { Destroy(); }

  bw_client* get() { return client_; }
  void Destroy() {
    bw_client_destroy(client_);
    client_ = nullptr;
  }
  // One block of the signal `rows`: every head of layers 0..layer_count-1.
  bw_status Push(int64_t step, const std::vector<float>& values, uint32_t layer_count, uint32_t head_count) {
    const bw_block block{.signal = bw_signal_by_name("rows"),
                         .layer_count = layer_count,
                         .head_count = head_count,
                         .values = values.data()};
    bw_frame frame{};
    frame.struct_size = sizeof(frame);
    frame.block_count = 1;
    frame.step = step;
    frame.blocks = &block;
    return bw_client_push(client_, &frame);
  }
  bw_status PushStep(int64_t step) { return Push(step, std::vector<float>(8, static_cast<float>(step)), 1, 8); }
  // Of tensors, from the first on.
  bw_status Name(const std::vector<const char*>& names) {
    return bw_client_push_names(client_, 7, 0, static_cast<uint32_t>(names.size()), names.data());
  }
  bw_counters Counters() const {
    bw_counters counters{};
    counters.struct_size = sizeof(counters);
    EXPECT_EQ(bw_client_get_counters(client_, &counters), BW_OK);
    return counters;
  }
  bw_status Flush(uint32_t timeout_ms = 60000) { return bw_client_flush(client_, timeout_ms); }

 private:
  bw_client* client_ = nullptr;
};

}  // namespace bellwether::client

#endif  // BELLWETHER_TESTS_CLIENT_LIB_TEST_CLIENT_H_
