// news.h: how often a watch has its open alert told again.
//
// What goes wrong while the alert is open is news, kNewsMax times.  Once nothing has been wrong for some
// steps the alert has ended, and all is news again.
//
// Plain values; not thread-safe.

#ifndef BELLWETHER_SERVER_DETECT_NEWS_H_
#define BELLWETHER_SERVER_DETECT_NEWS_H_

#include <algorithm>
#include <cstdint>

namespace bellwether::server {

inline constexpr uint32_t kNewsMax = 8;

class News {
 public:
  // A sample comes, of a step that may lie before those of an earlier attempt.
  void Begin(int64_t step, int64_t quiet_steps) {
    last_ = std::min(last_, step);
    if (last_ >= 0 && step - last_ > quiet_steps) *this = {};
  }
  void NoteWrong(int64_t step) { last_ = step; }
  // Whether anything was wrong lately.
  bool wrong_lately() const { return last_ >= 0; }
  // Counts what is new; whether the alert is told of it.
  bool Take() {
    if (told_ >= kNewsMax) return false;
    ++told_;
    return true;
  }

  template <class A>
  void Visit(A& a) {
    a(last_), a(told_);
  }
  // By themselves, where they were saved in different places.
  template <class A>
  void VisitTold(A& a) {
    a(told_);
  }
  template <class A>
  void VisitLast(A& a) {
    a(last_);
  }

 private:
  int64_t last_ = -1;  // At which anything was wrong.
  uint32_t told_ = 0;
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_DETECT_NEWS_H_
