/* client.h: report attention statistics from a training process.

   This is the whole public surface of libbellwether_client: C99, no other
   headers.  gRPC lives in a process of its own, bellwether-sender, which is
   started at the first push and shares a ring with this one.

   Rules every function keeps, unless it says otherwise:
   (1) It never blocks, never throws, never exits, prints nothing, and installs
       no signal handler.
   (2) It allocates only in bw_client_create().  A full ring drops the new
       frame and counts it; see bw_client_get_counters().
   (3) It may be called from any thread.
   (4) A client belongs to the process that created it.  In a child after
       fork() every call on it is a no-op that returns BW_UNAVAILABLE.
   (5) Structs start with struct_size so that fields can be appended without
       breaking older callers; unused pointers are NULL, unused numbers 0. */

#ifndef BELLWETHER_CLIENT_H_
#define BELLWETHER_CLIENT_H_

#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define BW_EXPORT __attribute__((visibility("default")))
#else
#define BW_EXPORT
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* Minor grows when something is added, major when something breaks. */
#define BW_API_VERSION_MAJOR 1
/* 1: ranks_agree; actions come as JSON.  2: the spool.  3: frames_stripped.  4: launch_unix_ms.
   5: signals of tensors, modules, layers, experts and ranks.  6: 128 blocks in a frame.
   7: it counts the functions that the Python package's hook calls, too; no header has them.
   8: own values of a frame.  9: 256 blocks in a frame. */
#define BW_API_VERSION_MINOR 9

#define BW_BLOCKS_MAX 256             /* Blocks in one frame. */
#define BW_LAYERS_MAX 512             /* Layers of one run. */
#define BW_HEADS_MAX 1024             /* Query heads of one layer. */
#define BW_WORLD_MAX 4096             /* Ranks of one run. */
#define BW_EVENT_TEXT_MAX 256         /* Bytes of an event's text. */
#define BW_SPECTRUM_ROWS_MAX 512      /* Rows of a Gram matrix. */
#define BW_EXPERTS_MAX 4096           /* Experts of one layer. */
#define BW_OWN_MAX 512                /* Own values in one frame. */
#define BW_OWN_VALUES_MAX 1024        /* Floats of one of them. */
#define BW_NAMED_ROWS_MAX 16384       /* Tensors of one run, and modules. */
#define BW_ROW_NAME_MAX 256           /* Bytes of the name of one. */
#define BW_NAMES_BYTES_MAX (1u << 18) /* Bytes of the names of one call, each with its closing zero. */

typedef enum bw_status {
  BW_OK = 0,
  BW_INVALID_ARGUMENT = 1, /* Caller error, bw_last_error() says which; nothing
                              happened. */
  BW_DROPPED = 2,          /* Ring full; counted, safe to ignore. */
  BW_UNAVAILABLE = 3,      /* Could not start, or not this process's client;
                              training goes on unwatched. */
  BW_INTERNAL = 4,         /* A bug in this library; please report it. */
  BW_TIMEOUT = 5           /* bw_client_flush() only. */
} bw_status;

/* (major << 16) | minor of the loaded library. */
BW_EXPORT uint32_t bw_abi_version(void);

/* One sentence about the last call on this thread that did not return BW_OK or
   BW_DROPPED: names the field, the value and the legal range.  Never NULL;
   valid until the next call on this thread. */
BW_EXPORT const char* bw_last_error(void);

/* ---- the signal catalogue ---- */

typedef struct bw_signal_info {
  uint32_t struct_size; /* = sizeof(bw_signal_info), set by the caller */
  uint32_t id;          /* Its number in signals.proto. */
  uint32_t granularity; /* 1 run, 2 query head, 3 key/value head, 4 layer, 5 expert,
                           6 rank, 7 tensor, 8 module */
  uint32_t merge;       /* 0 derived, 1 sum, 2 max, 3 mean, 4 equal */
  const char* name;     /* Static. */
  const char* unit;     /* Static. */
} bw_signal_info;

/* Number of a measured signal by its catalogue name; 0 if there is none. */
BW_EXPORT uint32_t bw_signal_by_name(const char* name);
/* Fills `*info` for the index-th signal, 0-based, by rising id.  Returns BW_OK
   or BW_INVALID_ARGUMENT (past the end). */
BW_EXPORT bw_status bw_signal_at(uint32_t index, bw_signal_info* info);

/* ---- a client ---- */

typedef struct bw_client bw_client;

typedef struct bw_client_options {
  uint32_t struct_size;      /* = sizeof(bw_client_options) */
  uint32_t rank;             /* 0-based, < world */
  uint32_t world;            /* 1..BW_WORLD_MAX; 0 = 1 */
  uint32_t reporters;        /* 1..world ranks that will report; 0 = world */
  uint32_t attempt;          /* 0-based restart of the run, 0..2^30 */
  uint32_t layers;           /* 1..BW_LAYERS_MAX */
  uint32_t heads;            /* 1..BW_HEADS_MAX query heads per layer */
  uint32_t kv_heads;         /* 1..heads, divides heads; 0 = heads */
  uint32_t head_dim;         /* 1..1024; 0 = unknown */
  uint32_t seq_len;          /* tokens, at most 2^30; 0 = unknown */
  uint32_t ring_frames;      /* 2..4096 slots; 0 = 256 */
  uint32_t frame_values_max; /* Most floats in one frame; 0 = from the layout:
                                100 head signals, 4 of experts, 16 of layers, 32 of the
                                run, and 8 of as many tensors as there may be */
  const char* run;           /* Name, [a-zA-Z0-9_.:/-]{1,128}, not NULL; copied, as
                                all strings here are */
  const char* run_uuid;      /* 32 hexadecimal digits, the same over attempts and
                                ranks; NULL = derived from `run` */
  const char* server;        /* "host:port" or "unix:/path"; NULL with record_path */
  const char* record_path;   /* Write a .bwrun here instead of, or beside, a
                                server; an earlier file is kept as PATH.1, .2,
                                ...; no FIFO, device or folder; NULL = no */
  const char* sender_path;   /* bellwether-sender; NULL = beside this library,
                                then $PATH */
  const char* tls_ca;        /* PEM files; NULL = plaintext */
  const char* tls_cert;
  const char* tls_key;
  const char* token_file;       /* Bearer token; NULL = none */
  const char* framework;        /* "torch 2.13.0" */
  const char* model;            /* Class of the model */
  const char* attention_kernel; /* "flash", "cudnn", "math", ... */
  const char* score_dtype;      /* "bf16", "fp16", "fp32" */
  const char* log_path;         /* The sender's log; NULL = the trainer's stderr,
                                   one line at most per cause */
  double weight_decay;
  float softcap;   /* 0 = none */
  uint32_t window; /* 0 = none */
  uint8_t causal;  /* These four: 0 or 1 */
  uint8_t centred;
  uint8_t qk_norm;
  uint8_t step_from_attach; /* Steps are counted from attaching. */
  uint32_t actions_mask;    /* Bit k: ActionKind k can be applied here. */
  /* Since 1.1: */
  uint32_t ranks_agree; /* 1 = the job passes an action from this rank on to
                           all its ranks and this one answers for them; 0 =
                           each rank is told, and answers, for itself */
  /* Since 1.2: */
  const char* spool_dir; /* Folder on this machine for what the sender's memory
                            cannot hold while the server is away; made with
                            mode 0700 if only it is missing; may be shared by
                            runs and ranks.  Needs `server`.  One that cannot
                            be used is said once, in the log.  NULL = no spool */
  uint64_t spool_bytes;  /* Most bytes there for this run and rank,
                            2^20..2^44; 0 = 2^30 */
  /* Since 1.4: */
  int64_t launch_unix_ms; /* When the job's processes were started, Unix ms,
                             the same at all its ranks, 0..2^53: the server
                             counts a later launch as a later attempt, also
                             where `attempt` does not; 0 = not known */
  /* Since 1.5: */
  uint32_t experts;  /* Of a layer, 0..BW_EXPERTS_MAX; 0 = none */
  uint32_t reserved; /* Must be 0. */
} bw_client_options;

/* Prepares a client and stores it in `*client`.  Allocates the ring; starts no
   thread and no process.  Returns BW_OK, BW_INVALID_ARGUMENT, or
   BW_UNAVAILABLE; `*client` is NULL unless BW_OK. */
BW_EXPORT bw_status bw_client_create(const bw_client_options* options, bw_client** client);

/* Lets go of `client`, which no other thread may be using; NULL is a no-op.
   Waits for nothing: the sender sends what the ring holds and then ends.  */
BW_EXPORT void bw_client_destroy(bw_client* client);

/* ---- what goes in ---- */

/* One signal of a rectangle of heads; or of a range of rows that are no heads: they take
   the place of the layers, and the heads are 0 and 1, or experts. */
typedef struct bw_block {
  uint32_t signal;      /* Its number in signals.proto, a measured one. */
  uint32_t reserved;    /* Must be 0. */
  uint32_t layer_begin; /* 0-based, global; run signals: 0; of tensors and modules as
                           bw_client_push_names() counts them; of ranks the rank */
  uint32_t layer_count; /* >= 1, within the layout, the names or the world; run
                           signals: 1 */
  uint32_t head_begin;  /* 0-based, global; run signals: 0 */
  uint32_t head_count;  /* >= 1, within the layout's (key) heads or experts, else 1 */
  const float* values;  /* [layer_count][head_count], in the signal's unit; NaN
                           and infinity are data and are sent like any other */
} bw_block;

/* Numbers of one signal that the job names itself.  The first values of a name say what it is for the
   whole run; the server leaves out and counts what says something else. */
typedef struct bw_own_values {
  const char* name;     /* [a-z][a-z0-9_./-]{0,63}, no name of the catalogue */
  const char* unit;     /* At most 32 bytes; NULL = not said here */
  const char* help;     /* At most 256 bytes; NULL = not said here */
  uint32_t granularity; /* 1 run, 2 head, 4 layer, 5 expert, 6 rank */
  uint32_t merge;       /* Of ranks: 1 sum, 2 max, 3 mean */
  uint32_t layer;       /* Of the first value, or its rank; run: 0 */
  uint32_t head;        /* Or the expert; else 0 */
  uint32_t count;       /* 1..BW_OWN_VALUES_MAX: of heads or experts of one layer, or
                           of layers or ranks, one after the other; run: 1 */
  uint32_t limits;      /* Bit 0: `low` is said; bit 1: `high` is */
  double low, high;     /* Finite, low at most high; a value beyond them is wrong */
  const float* values;  /* [count]; NaN and infinity are data */
} bw_own_values;

/* What one rank measured in one step. */
typedef struct bw_frame {
  uint32_t struct_size;   /* = sizeof(bw_frame) */
  uint32_t block_count;   /* 1..BW_BLOCKS_MAX */
  int64_t step;           /* Optimizer step, 0..2^53; may go back after a
                             rollback (a new attempt). */
  int64_t time_unix_ns;   /* When the step ended; 0 = now */
  const bw_block* blocks; /* [block_count]; an absent signal = not measured */
  uint32_t partial_rows;  /* 1 = rows of a context-parallel shard */
  uint32_t reserved;      /* Must be 0. */
  /* Since 1.8: */
  uint32_t own_count;       /* 0..BW_OWN_MAX */
  uint32_t reserved2;       /* Must be 0. */
  const bw_own_values* own; /* [own_count] */
} bw_frame;

/* Queues one frame; `*frame`, its blocks and their values are copied.  No
   lock, no system call, no allocation once the first push has started the
   sender.  Calls for one client must not overlap.  Returns BW_OK, BW_DROPPED,
   BW_UNAVAILABLE (the link failed for good; counted in frames_dropped_ring), or
   BW_INVALID_ARGUMENT (nothing is queued or counted). */
BW_EXPORT bw_status bw_client_push(bw_client* client, const bw_frame* frame);

/* What tensors (`granularity` 7) or modules (8) of frames are: names[0..count) are the rows
   from `first` on, which is how many were named before, so that rows have no gaps.  The
   same names may be pushed again, from 0 or from where it is not known that they arrived.
   1..BW_ROW_NAME_MAX bytes of UTF-8 each, each once, and BW_NAMES_BYTES_MAX together.  A name
   is that of the whole tensor, the same at all ranks that hold it or a part of it.  Ordered
   with the frames; same rules and results as bw_client_push(). */
BW_EXPORT bw_status bw_client_push_names(bw_client* client, uint32_t granularity, uint32_t first, uint32_t count,
                                         const char* const* names);

/* Something that happened; ordered with the frames.  `kind` is an EventKind of
   runs.proto.  Same rules and results as bw_client_push(). */
BW_EXPORT bw_status bw_client_push_event(bw_client* client, int64_t step, uint32_t kind, double value,
                                         const char* text);

/* A Gram matrix of one head: `upper` holds its upper triangle by rows,
   n (n + 1) / 2 floats; `kind` is a SpectrumKind of ingest.proto.  Same rules
   and results as bw_client_push(). */
BW_EXPORT bw_status bw_client_push_spectrum(bw_client* client, int64_t step, uint32_t layer, uint32_t head,
                                            uint32_t kind, uint32_t n, float scale, const float* upper);

/* ---- what comes back ---- */

typedef enum bw_command_type {
  BW_COMMAND_NONE = 0,
  BW_COMMAND_SAMPLING = 1, /* value = period in steps; payload = a serialized
                              bellwether.v1.Sampling */
  BW_COMMAND_ACTION = 2    /* payload = an action as JSON; see below */
} bw_command_type;

/* The JSON of an action is that of protobuf for bellwether.v1.Action with the
   proto's field names, without a closing zero: what is absent has its default,
   enums are names, 64-bit integers are strings.  It has these fields only:
     {"id": "6f1b0a2c-3", "attempt": 1, "kind": "ACTION_KIND_CENTER_K",
      "scope": {"layers": [2, 3], "heads": [{"layer": 5, "head": 7}]},
      "mode": "hp", "value": 1, "apply_at_step": "1200",
      "expires_unix_ns": "1790000000000000000", "undoes": "6f1b0a2c-2"}
   An empty scope is the whole model; apply_at_step 0 is the next boundary.
   Only kinds of actions_mask come.  The same action can come more than once,
   after each reconnection until it is answered: apply it once, by its id, and
   answer each time alike, with bw_client_push_action_result().  Refuse what is
   past expires_unix_ns or past apply_at_step ("expired", "late"). */

typedef struct bw_command {
  uint32_t struct_size; /* = sizeof(bw_command), set by the caller */
  uint32_t type;        /* bw_command_type */
  double value;
  uint32_t payload_bytes;
  uint8_t payload[4092];
} bw_command;

/* Takes the oldest command that the server sent, BW_COMMAND_NONE if there is
   none.  Calls for one client must not overlap. */
BW_EXPORT bw_status bw_client_poll(bw_client* client, bw_command* command);

/* Answers an action.  Ordered with the frames; same rules and results as
   bw_client_push(). */
BW_EXPORT bw_status bw_client_push_action_result(bw_client* client, const char* id, int64_t step, uint32_t applied,
                                                 const char* reason);

typedef enum bw_link_state {
  BW_LINK_IDLE = 0,       /* Nothing was pushed yet. */
  BW_LINK_STARTING = 1,   /* The sender is being started. */
  BW_LINK_CONNECTING = 2, /* The server does not answer (yet). */
  BW_LINK_STREAMING = 3,
  BW_LINK_RECORDING = 4, /* To a file only. */
  BW_LINK_FAILED = 5     /* For good; `error` says why. */
} bw_link_state;

typedef struct bw_counters {
  uint32_t struct_size;           /* = sizeof(bw_counters), set by the caller */
  uint32_t link;                  /* bw_link_state */
  uint64_t frames_queued;         /* Frames, events, spectra, results; since creation */
  uint64_t frames_dropped_ring;   /* The ring was full. */
  uint64_t frames_dropped_window; /* The sender's window (and spool) was full, or
                                     frames on disk cannot be sent any more. */
  uint64_t frames_sent;           /* Taken from the ring and sent or recorded. */
  uint64_t frames_acked;          /* Durable at the server (or in the file). */
  uint64_t reconnects;
  uint64_t sender_restarts;
  uint32_t sender_pid;            /* 0 = none */
  uint32_t sampling_period_steps; /* As the server last asked; 0 = free */
  char error[256];                /* The sender's last trouble; "" = none */
  char page_url[256];             /* The run's page; "" = unknown */
  /* Since 1.2: */
  uint64_t frames_spooled; /* That went to disk, sent or not. */
  uint64_t spool_bytes;    /* On disk now, with what earlier attempts left. */
  /* Since 1.3: */
  uint64_t frames_stripped; /* Of which only the signals of the run were sent,
                               as the sender's window was nearly full; not among
                               the dropped ones. */
} bw_counters;

/* Writes the counters to `*counters`.  Returns BW_OK or BW_INVALID_ARGUMENT. */
BW_EXPORT bw_status bw_client_get_counters(const bw_client* client, bw_counters* counters);

/* Waits until everything pushed so far is durable at the server (recording: in
   the file), at most `timeout_ms`.  The one call that blocks.  What the window
   dropped counts as done; see frames_dropped_window.  Returns BW_OK,
   BW_TIMEOUT, BW_UNAVAILABLE (the link failed for good), or
   BW_INVALID_ARGUMENT. */
BW_EXPORT bw_status bw_client_flush(bw_client* client, uint32_t timeout_ms);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* BELLWETHER_CLIENT_H_ */
