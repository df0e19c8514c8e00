// client.hpp: client.h for C++17, with an owner and without pointers to free.
//
// Header only: no C++ symbol crosses the library's border, nothing throws.
// The rules are those of client.h, above all (1): nothing here blocks but
// Flush().  An empty Client (moved from, or whose creation failed) answers
// BW_INVALID_ARGUMENT to everything.

#ifndef BELLWETHER_CLIENT_HPP_
#define BELLWETHER_CLIENT_HPP_

#include <cstdint>
#include <utility>

#include "bellwether/client.h"

namespace bellwether {

class Client {
 public:
  // Zeroed options with struct_size filled in.
  static bw_client_options Options() noexcept {
    bw_client_options options{};
    options.struct_size = sizeof(options);
    return options;
  }

  // See bw_client_create(); `*client` keeps what it had unless BW_OK.
  [[nodiscard]] static bw_status Create(const bw_client_options& options, Client* client) noexcept {
    bw_client* handle = nullptr;
    const bw_status status = bw_client_create(&options, &handle);
    if (status == BW_OK) *client = Client(handle);
    return status;
  }

  Client() noexcept = default;
  ~Client() { bw_client_destroy(handle_); }
  Client(Client&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
  Client& operator=(Client&& other) noexcept {
    if (this != &other) {
      bw_client_destroy(handle_);
      handle_ = std::exchange(other.handle_, nullptr);
    }
    return *this;
  }
  Client(const Client&) = delete;
  Client& operator=(const Client&) = delete;

  explicit operator bool() const noexcept { return handle_ != nullptr; }

  // `blocks` is [block_count]; time is now.
  bw_status Push(int64_t step, const bw_block* blocks, uint32_t block_count) noexcept {
    bw_frame frame{};
    frame.struct_size = sizeof(frame);
    frame.block_count = block_count;
    frame.step = step;
    frame.blocks = blocks;
    return bw_client_push(handle_, &frame);
  }
  bw_status Push(const bw_frame& frame) noexcept { return bw_client_push(handle_, &frame); }
  bw_status PushEvent(int64_t step, uint32_t kind, double value, const char* text = nullptr) noexcept {
    return bw_client_push_event(handle_, step, kind, value, text);
  }
  bw_status PushActionResult(const char* id, int64_t step, bool applied, const char* reason = nullptr) noexcept {
    return bw_client_push_action_result(handle_, id, step, applied ? 1 : 0, reason);
  }

  // `command->type` is BW_COMMAND_NONE if there is nothing.
  bw_status Poll(bw_command* command) noexcept {
    command->struct_size = sizeof(*command);
    return bw_client_poll(handle_, command);
  }
  bw_status GetCounters(bw_counters* counters) const noexcept {
    counters->struct_size = sizeof(*counters);
    return bw_client_get_counters(handle_, counters);
  }
  [[nodiscard]] bw_status Flush(uint32_t timeout_ms) noexcept { return bw_client_flush(handle_, timeout_ms); }

  // For the calls that are not wrapped; stays owned.
  bw_client* get() const noexcept { return handle_; }

 private:
  explicit Client(bw_client* handle) noexcept : handle_(handle) {}

  bw_client* handle_ = nullptr;
};

}  // namespace bellwether

#endif  // BELLWETHER_CLIENT_HPP_
