// faulty_disk.c: a library to preload that makes a process's disk fail, and
// writes down what the disk would hold had the power gone at any moment.
//
//   FAULTY_DISK_ROOT     only files beneath this folder are touched
//   FAULTY_DISK_CONTROL  a file of the Control below, mapped: the test changes it
//                        while the process runs
//   FAULTY_DISK_JOURNAL  every change of a file or a folder is appended here once
//                        it has happened, and every sync before and after
//                        ("" = none); faulty_disk.py makes of it what a power
//                        cut leaves
//
// A record of the journal is 8 x i64 {kind, inode, offset, length, flags, path
// bytes, data bytes, time} followed by path and data, written with one call.  What
// is beneath the root but goes past these functions (memory maps, stdio) is not
// seen; the log and RocksDB, as it is set up here, write with none of them.
// Thread-safe.

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

// int32 each; faulty_disk.py has the same list.
struct Control {
  volatile int32_t sync_delay_ms;  // Each sync takes so much longer.
  volatile int32_t sync_errno;     // Each sync fails with it; 0 = none.
  volatile int32_t write_errno;    // Each write, creation and allocation fails with it.
  volatile int32_t where;          // 0 everywhere, 1 beneath wal/, 2 beneath db/.
  volatile int32_t free_mb;        // What the file system claims to have free; -1 = what is.
  volatile int32_t lies;           // 1: a sync of a file says that it is done, and is not.
  volatile int32_t syncs;          // Counted here.
  volatile int32_t refused;        // Likewise: calls that were made to fail.
};

enum Kind {
  kCreate = 1,
  kWrite,
  kTruncate,
  kRename,
  kUnlink,
  kMakeDirectory,
  kSyncBegin,
  kSyncEnd,
  kSyncDirectory,
  kLink
};
enum { kZeros = 1 };  // flags of kWrite: the data is `length` zeros and left out.

#define MAX_FDS 65536
static struct Control nowhere = {.free_mb = -1};
static struct Control* control = &nowhere;
static char root[PATH_MAX];
static size_t root_bytes;
static int journal = -1;
static volatile uint64_t inode_of[MAX_FDS];  // 0 = not ours
static volatile uint8_t place_of[MAX_FDS];   // As Control.where.
static volatile uint8_t is_folder[MAX_FDS];

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

__attribute__((constructor)) static void Start(void) {
  const char* const where = getenv("FAULTY_DISK_ROOT");
  if (where == NULL || strlen(where) >= sizeof(root)) return;
  strcpy(root, where);
  root_bytes = strlen(root);
  const char* const file = getenv("FAULTY_DISK_CONTROL");
  const int fd = file == NULL ? -1 : REAL(open64)(file, O_RDWR | O_CLOEXEC);
  if (fd >= 0) {
    void* const mapped = mmap(NULL, sizeof(struct Control), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (mapped != MAP_FAILED) control = mapped;
    close(fd);
  }
  const char* const log = getenv("FAULTY_DISK_JOURNAL");
  if (log != NULL && log[0] != '\0') journal = REAL(open64)(log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
}

static bool IsOurs(const char* path) {
  return root_bytes > 0 && path != NULL && strncmp(path, root, root_bytes) == 0 &&
         (path[root_bytes] == '/' || path[root_bytes] == '\0');
}
static uint8_t PlaceOf(const char* path) {
  return strstr(path, "/wal") != NULL ? 1 : strstr(path, "/db") != NULL ? 2 : 0;
}
static bool Fails(int error, uint8_t place) {
  if (error == 0 || (control->where != 0 && control->where != place)) return false;
  __atomic_fetch_add(&control->refused, 1, __ATOMIC_RELAXED);
  errno = error;
  return true;
}
static bool Known(int fd) { return fd >= 0 && fd < MAX_FDS && inode_of[fd] != 0; }

static void Note(enum Kind kind, uint64_t inode, int64_t offset, int64_t length, const char* path, const char* path2,
                 const void* data, size_t bytes, int64_t flags) {
  if (journal < 0) return;
  const int before = errno;
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  char names[2 * PATH_MAX];
  const int named = snprintf(names, sizeof(names), "%s%s%s", path ? path : "", path2 ? "\n" : "", path2 ? path2 : "");
  const int64_t head[8] = {kind,  (int64_t)inode, offset,         length,
                           flags, named,          (int64_t)bytes, now.tv_sec * 1000000000LL + now.tv_nsec};
  const struct iovec parts[3] = {{(void*)head, sizeof(head)}, {names, (size_t)named}, {(void*)data, bytes}};
  if (REAL(writev)(journal, parts, 3) < 0) abort();  // A test with holes in its journal proves nothing.
  errno = before;
}

static void NoteWrite(int fd, int64_t offset, const void* data, size_t bytes) {
  if (journal < 0) return;
  const char* const from = data;
  const bool zeros = bytes > 0 && from[0] == 0 && memcmp(from, from + 1, bytes - 1) == 0;
  Note(kWrite, inode_of[fd], offset, (int64_t)bytes, NULL, NULL, zeros ? "" : data, zeros ? 0 : bytes,
       zeros ? kZeros : 0);
}

// ---- files ----

static int Opened(int fd, const char* path, int flags, bool is_new) {
  struct stat info;
  if (fd < 0 || fd >= MAX_FDS || !IsOurs(path) || fstat(fd, &info) != 0) return fd;
  place_of[fd] = PlaceOf(path);
  is_folder[fd] = S_ISDIR(info.st_mode);
  inode_of[fd] = info.st_ino;
  if (is_new && !is_folder[fd]) {
    Note(kCreate, info.st_ino, 0, 0, path, NULL, "", 0, 0);
  } else if ((flags & O_TRUNC) != 0) {
    Note(kTruncate, info.st_ino, 0, 0, NULL, NULL, "", 0, 0);
  }
  return fd;
}

static int Open(const char* path, int flags, mode_t mode) {
  if (!IsOurs(path)) return REAL(open64)(path, flags, mode);
  const bool is_new = (flags & O_CREAT) != 0 && access(path, F_OK) != 0;
  if (is_new && Fails(control->write_errno, PlaceOf(path))) return -1;
  return Opened(REAL(open64)(path, flags, mode), path, flags, is_new);
}
static mode_t ModeOf(int flags, va_list rest) { return (flags & O_CREAT) != 0 ? va_arg(rest, mode_t) : 0; }
int open64(const char* path, int flags, ...) {
  va_list rest;
  va_start(rest, flags);
  const mode_t mode = ModeOf(flags, rest);
  va_end(rest);
  return Open(path, flags, mode);
}
int open(const char* path, int flags, ...) {
  va_list rest;
  va_start(rest, flags);
  const mode_t mode = ModeOf(flags, rest);
  va_end(rest);
  return Open(path, flags, mode);
}
int close(int fd) {
  if (Known(fd)) inode_of[fd] = 0;
  return REAL(close)(fd);
}

ssize_t pwrite64(int fd, const void* data, size_t bytes, off64_t offset) {
  if (!Known(fd)) return REAL(pwrite64)(fd, data, bytes, offset);
  if (Fails(control->write_errno, place_of[fd])) return -1;
  const ssize_t done = REAL(pwrite64)(fd, data, bytes, offset);
  if (done > 0) NoteWrite(fd, offset, data, (size_t)done);
  return done;
}
ssize_t pwrite(int fd, const void* data, size_t bytes, off_t offset) { return pwrite64(fd, data, bytes, offset); }
ssize_t write(int fd, const void* data, size_t bytes) {
  if (!Known(fd)) return REAL(write)(fd, data, bytes);
  if (Fails(control->write_errno, place_of[fd])) return -1;
  const ssize_t done = REAL(write)(fd, data, bytes);
  if (done > 0) NoteWrite(fd, lseek64(fd, 0, SEEK_CUR) - done, data, (size_t)done);
  return done;
}
int ftruncate64(int fd, off64_t length) {
  const int result = REAL(ftruncate64)(fd, length);
  if (result == 0 && Known(fd)) Note(kTruncate, inode_of[fd], 0, length, NULL, NULL, "", 0, 0);
  return result;
}
int ftruncate(int fd, off_t length) { return ftruncate64(fd, length); }
// Room that is only set aside holds zeros; with KEEP_SIZE it changes nothing that can be read.
int fallocate64(int fd, int mode, off64_t offset, off64_t length) {
  if (Known(fd) && Fails(control->write_errno, place_of[fd])) return -1;
  return REAL(fallocate64)(fd, mode, offset, length);
}
int fallocate(int fd, int mode, off_t offset, off_t length) { return fallocate64(fd, mode, offset, length); }
int posix_fallocate64(int fd, off64_t offset, off64_t length) {
  if (Known(fd) && Fails(control->write_errno, place_of[fd])) return errno;
  return REAL(posix_fallocate64)(fd, offset, length);
}
int posix_fallocate(int fd, off_t offset, off_t length) { return posix_fallocate64(fd, offset, length); }

// ---- syncs ----

static int Sync(int fd, int (*real)(int)) {
  if (!Known(fd)) return real(fd);
  __atomic_fetch_add(&control->syncs, 1, __ATOMIC_RELAXED);
  if (control->sync_delay_ms > 0 && (control->where == 0 || control->where == place_of[fd])) {
    const struct timespec delay = {control->sync_delay_ms / 1000, control->sync_delay_ms % 1000 * 1000000L};
    nanosleep(&delay, NULL);
  }
  if (Fails(control->sync_errno, place_of[fd])) return -1;
  if (control->lies && !is_folder[fd]) return 0;
  if (!is_folder[fd]) Note(kSyncBegin, inode_of[fd], 0, 0, NULL, NULL, "", 0, 0);
  const int result = real(fd);
  if (result != 0) return result;
  if (is_folder[fd]) {
    char link[64], path[PATH_MAX];
    snprintf(link, sizeof(link), "/proc/self/fd/%d", fd);
    const ssize_t bytes = readlink(link, path, sizeof(path) - 1);
    if (bytes > 0) {
      path[bytes] = '\0';
      Note(kSyncDirectory, inode_of[fd], 0, 0, path, NULL, "", 0, 0);
    }
  } else {
    Note(kSyncEnd, inode_of[fd], 0, 0, NULL, NULL, "", 0, 0);
  }
  return 0;
}
int fsync(int fd) { return Sync(fd, REAL(fsync)); }
int fdatasync(int fd) { return Sync(fd, REAL(fdatasync)); }

// ---- names ----

int rename(const char* from, const char* to) {
  const int result = REAL(rename)(from, to);
  if (result == 0 && IsOurs(to)) Note(kRename, 0, 0, 0, from, to, "", 0, 0);
  return result;
}
int link(const char* from, const char* to) {
  const int result = REAL(link)(from, to);
  if (result == 0 && IsOurs(to)) Note(kLink, 0, 0, 0, from, to, "", 0, 0);
  return result;
}
static int Removed(int result, const char* path) {
  if (result == 0 && IsOurs(path)) Note(kUnlink, 0, 0, 0, path, NULL, "", 0, 0);
  return result;
}
int unlink(const char* path) { return Removed(REAL(unlink)(path), path); }
int rmdir(const char* path) { return Removed(REAL(rmdir)(path), path); }
int remove(const char* path) { return Removed(REAL(remove)(path), path); }
int mkdir(const char* path, mode_t mode) {
  if (IsOurs(path) && access(path, F_OK) != 0 && Fails(control->write_errno, PlaceOf(path))) return -1;
  const int result = REAL(mkdir)(path, mode);
  if (result == 0 && IsOurs(path)) Note(kMakeDirectory, 0, 0, 0, path, NULL, "", 0, 0);
  return result;
}

// ---- room ----

int statvfs64(const char* path, struct statvfs64* info) {
  const int result = REAL(statvfs64)(path, info);
  if (result == 0 && IsOurs(path) && control->free_mb >= 0) {
    info->f_bavail = info->f_bfree = ((uint64_t)control->free_mb << 20) / info->f_frsize;
  }
  return result;
}
int statvfs(const char* path, struct statvfs* info) { return statvfs64(path, (struct statvfs64*)info); }
