// tsan_absl.cc: tells ThreadSanitizer what abseil's mutex does.
//
// Debian's abseil is built without the sanitizer, so that everything an
// absl::Mutex guards looks like a race.  In the tsan preset the linker sends our
// calls of these functions here (--wrap, tests/CMakeLists.txt); each is the real
// one with the happens-before edges that it makes.  A waiter's condition is
// evaluated by whoever unlocks, on behalf of the waiter: those reads are ignored.
// The names hold the inline namespace of Debian's build.

#pragma GCC visibility push(default)  // The libraries call them too.

extern "C" {

void __tsan_acquire(void* address);
void __tsan_release(void* address);
void AnnotateIgnoreReadsBegin(const char* file, int line);
void AnnotateIgnoreReadsEnd(const char* file, int line);
void AnnotateIgnoreWritesBegin(const char* file, int line);
void AnnotateIgnoreWritesEnd(const char* file, int line);

namespace {
struct Ignored {
  Ignored() {
    AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
    AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
  }
  ~Ignored() {
    AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
    AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
  }
};
// absl::Duration and absl::Time as they are passed: 12 bytes in two registers.
struct Span {
  long high;
  unsigned low;
};
}  // namespace

#define REAL(name) __real_##name
#define WRAP(name) __wrap_##name
#define LOCK _ZN4absl7debian35Mutex4LockEv
#define TRY_LOCK _ZN4absl7debian35Mutex7TryLockEv
#define UNLOCK _ZN4absl7debian35Mutex6UnlockEv
#define AWAIT _ZN4absl7debian35Mutex5AwaitERKNS0_9ConditionE
#define AWAIT_TIMEOUT _ZN4absl7debian35Mutex16AwaitWithTimeoutERKNS0_9ConditionENS0_8DurationE
#define AWAIT_DEADLINE _ZN4absl7debian35Mutex17AwaitWithDeadlineERKNS0_9ConditionENS0_4TimeE
#define NOTIFY _ZN4absl7debian312Notification6NotifyEv
#define WAIT_NOTIFIED _ZNK4absl7debian312Notification19WaitForNotificationEv
#define PASTE(macro, name) macro(name)

void PASTE(REAL, LOCK)(void*);
void PASTE(WRAP, LOCK)(void* mutex) {
  PASTE(REAL, LOCK)(mutex);
  __tsan_acquire(mutex);
}
bool PASTE(REAL, TRY_LOCK)(void*);
bool PASTE(WRAP, TRY_LOCK)(void* mutex) {
  const bool locked = PASTE(REAL, TRY_LOCK)(mutex);
  if (locked) __tsan_acquire(mutex);
  return locked;
}
void PASTE(REAL, UNLOCK)(void*);
void PASTE(WRAP, UNLOCK)(void* mutex) {
  __tsan_release(mutex);
  const Ignored ignored;
  PASTE(REAL, UNLOCK)(mutex);
}
void PASTE(REAL, AWAIT)(void*, const void*);
void PASTE(WRAP, AWAIT)(void* mutex, const void* condition) {
  __tsan_release(mutex);
  {
    const Ignored ignored;
    PASTE(REAL, AWAIT)(mutex, condition);
  }
  __tsan_acquire(mutex);
}
bool PASTE(REAL, AWAIT_TIMEOUT)(void*, const void*, Span);
bool PASTE(WRAP, AWAIT_TIMEOUT)(void* mutex, const void* condition, Span timeout) {
  __tsan_release(mutex);
  bool met = false;
  {
    const Ignored ignored;
    met = PASTE(REAL, AWAIT_TIMEOUT)(mutex, condition, timeout);
  }
  __tsan_acquire(mutex);
  return met;
}
bool PASTE(REAL, AWAIT_DEADLINE)(void*, const void*, Span);
bool PASTE(WRAP, AWAIT_DEADLINE)(void* mutex, const void* condition, Span deadline) {
  __tsan_release(mutex);
  bool met = false;
  {
    const Ignored ignored;
    met = PASTE(REAL, AWAIT_DEADLINE)(mutex, condition, deadline);
  }
  __tsan_acquire(mutex);
  return met;
}
void PASTE(REAL, NOTIFY)(void*);
void PASTE(WRAP, NOTIFY)(void* notification) {
  __tsan_release(notification);
  PASTE(REAL, NOTIFY)(notification);
}
void PASTE(REAL, WAIT_NOTIFIED)(void*);
void PASTE(WRAP, WAIT_NOTIFIED)(void* notification) {
  PASTE(REAL, WAIT_NOTIFIED)(notification);
  __tsan_acquire(notification);
}

}  // extern "C"
