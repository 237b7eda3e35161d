/* The C interface of the point-to-point transport between the ranks of a job.
 *
 * One transport per process connects a rank to every rank of the job. Messages are named by a key
 * (source rank, program, step, edge, microbatch), may be sent and awaited in any order, and land in
 * memory that the receiver provides once it has seen the header. One thread drives the network, one
 * watches over the process; nothing here blocks except where it says so. There is no TensorFlow in
 * this library.
 *
 *   smp_transport_create ─▶ address bytes ─▶ (the caller exchanges them) ─▶ smp_transport_connect
 *        ─▶ smp_transport_send / smp_transport_recv ... ─▶ smp_transport_goodbye ─▶ _destroy
 *
 * A failure anywhere (a lost peer, an abort, a stall without end) becomes THE cause: the first one
 * is told to all ranks, printed once per process, ends every operation with an error, and ends the
 * process when it has not ended by itself after a grace time.
 *
 * Every function may be called from any thread. Text is UTF-8. A child that the process forks is no
 * rank: it closes what it has of the transport, and must not call it.
 */
#ifndef SMP_TF_OPS_CC_TRANSPORT_SMP_TRANSPORT_H_
#define SMP_TF_OPS_CC_TRANSPORT_SMP_TRANSPORT_H_

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define SMP_API __attribute__((visibility("default")))

/* Version of this interface: checked by callers that load the library at run time. */
#define SMP_TRANSPORT_ABI 5
SMP_API int smp_transport_abi(void);

/* Status codes have the numbers of absl::StatusCode. */
enum {
  SMP_OK = 0,
  SMP_CANCELLED = 1,
  SMP_INVALID_ARGUMENT = 3,
  SMP_DEADLINE_EXCEEDED = 4,
  SMP_FAILED_PRECONDITION = 9,
  SMP_ABORTED = 10,
  SMP_UNIMPLEMENTED = 12,
  SMP_INTERNAL = 13,
  SMP_UNAVAILABLE = 14,
};

/* Where a buffer lies. Only SMP_MEMORY_HOST is implemented; others end with SMP_UNIMPLEMENTED. */
enum { SMP_MEMORY_HOST = 0, SMP_MEMORY_CUDA = 1 };

typedef struct smp_transport smp_transport;

typedef struct smp_options {
  uint64_t struct_bytes;       /* sizeof(smp_options) of the caller */
  int32_t single_host;         /* 1: shared memory only, no network transport is opened */
  int32_t local_size;          /* ranks on this host; decides whether the thread may spin */
  int32_t spin_us;             /* busy waiting before sleep; -1: 20 if there are cores to spare */
  int32_t watch_launcher;      /* 1: end when the launcher dies */
  int32_t watch_signals;       /* 1: SIGINT and SIGTERM end all ranks at once */
  int32_t end_process;         /* 0: report failures, but never end the process */
  int32_t read_memory;         /* 1: fetch large tensors from the memory of ranks of this host */
  int32_t huge_pages;          /* 1: move the memory of large messages into huge pages */
  double stall_report_s;       /* say who waits for whom after this time */
  double stall_timeout_s;      /* and fail after this time */
  double grace_s;              /* time a failed process has to end by itself */
  const char* network_devices; /* UCX_NET_DEVICES between hosts; NULL or "": UCX chooses */
} smp_options;

/* Fills in the defaults: single host, report 30 s, timeout 1800 s, grace 4 s. */
SMP_API void smp_options_init(smp_options* options);

/* What a message says of itself, before its data is placed. */
typedef struct smp_message_info {
  uint32_t source;
  int32_t dtype; /* the sender's own numbering (TensorFlow's DataType for ops) */
  int32_t ndim;
  const int64_t* dims;
  uint64_t bytes;
  const char* label; /* the sender's label */
} smp_message_info;

typedef struct smp_key {
  uint64_t program; /* programs from SMP_RESERVED_PROGRAMS up are the library's own */
  int64_t step;
  uint64_t edge;
  uint64_t microbatch;
} smp_key;
#define SMP_RESERVED_PROGRAMS 0xffffffff00000000ull

typedef struct smp_buffer {
  void* data;
  uint64_t bytes;
  int32_t memory_kind;
  void* ready_event; /* device event after which data may be touched; NULL for host memory */
} smp_buffer;

/* Ends an operation, exactly once. Runs on the progress thread or inside smp_transport_send/_recv
 * with no lock held; must be short and must not block. `message` is valid during the call. */
typedef void (*smp_done_fn)(void* arg, int code, const char* message);

/* Called exactly once, after done, when the transport no longer touches the buffer. An operation
 * that ends by cancellation or failure may hold its buffer longer than its status was awaited. */
typedef void (*smp_release_fn)(void* arg);

/* Provides memory for an arrived message: fills `buffer` (of info->bytes) and returns SMP_OK, or
 * returns another code with a message in `error` (of `error_bytes`), which ends the receive with
 * that status and drops the message. Runs under the transport's lock: must not call it. */
typedef int (*smp_allocate_fn)(void* arg, const smp_message_info* info, smp_buffer* buffer,
                               char* error, size_t error_bytes);

typedef struct smp_send_params {
  uint64_t id; /* of smp_transport_new_id */
  uint32_t destination;
  smp_key key;
  int32_t dtype;
  int32_t ndim;
  const int64_t* dims; /* copied */
  const char* label;   /* copied, as much of it as 200 bytes hold */
  smp_buffer buffer;   /* must stay valid until release */
  smp_done_fn done;
  smp_release_fn release;
  void* arg;
} smp_send_params;

typedef struct smp_recv_params {
  uint64_t id;
  uint32_t source;
  smp_key key;
  const char* label;
  smp_allocate_fn allocate;
  smp_done_fn done;
  smp_release_fn release;
  void* arg;
} smp_recv_params;

/* Opens the transport of `rank` out of `size`. NULL on failure, with the reason in `error`. */
SMP_API smp_transport* smp_transport_create(uint32_t rank, uint32_t size,
                                            const smp_options* options, char* error,
                                            size_t error_bytes);

/* Lets a process that a signal ends while it waits for other ranks, before it has a transport, say
 * for whom it waited. SIGINT and SIGTERM end it, at the latest some seconds later; so does an
 * exception of Gloo's that nobody catches. `about` names the process. To be closed before a
 * transport watches signals. */
typedef struct smp_start_guard smp_start_guard;
SMP_API smp_start_guard* smp_start_guard_create(const char* about, char* error, size_t error_bytes);

/* Waits for so many seconds, fewer than a clock of nanoseconds has, for a signal, or until the
 * guard is closed; 1 if a signal has come. */
SMP_API int smp_start_guard_wait(smp_start_guard*, double seconds);

/* What a process that heard a signal says behind "was ended by SIGTERM in smp.init". */
SMP_API void smp_start_guard_say(smp_start_guard*, const char* words);

/* Leaves signals as they were, and ends a wait. */
SMP_API void smp_start_guard_close(smp_start_guard*);

/* Frees a guard that is closed and that nobody waits in. */
SMP_API void smp_start_guard_free(smp_start_guard*);

/* SIGINT and SIGTERM end all ranks from here on. */
SMP_API void smp_transport_watch_signals(smp_transport*);

/* The bytes that peers need to reach this rank. Valid as long as the transport. */
SMP_API const void* smp_transport_address(smp_transport*, size_t* bytes);

/* Begins to connect to all ranks: `addresses[r]` are the address bytes of rank r, `secret` the
 * job's random secret, known to the ranks of this job only. Returns a status code. */
SMP_API int smp_transport_connect(smp_transport*, const void* const* addresses,
                                  const size_t* address_bytes, size_t count, const void* secret,
                                  size_t secret_bytes, char* error, size_t error_bytes);

/* Waits until every rank has proved the secret and has verified ours. SMP_OK, or
 * SMP_DEADLINE_EXCEEDED naming the missing ranks, or SMP_ABORTED with the cause. Blocks. */
SMP_API int smp_transport_wait_connected(smp_transport*, double timeout_s, char* error,
                                         size_t error_bytes);

/* A number for one operation, by which it may be cancelled. */
SMP_API uint64_t smp_transport_new_id(smp_transport*);
SMP_API void smp_transport_send(smp_transport*, const smp_send_params*);
SMP_API void smp_transport_recv(smp_transport*, const smp_recv_params*);

/* Ends an operation with SMP_CANCELLED if it has not ended. Its done runs on the progress thread,
 * never inside this call. */
SMP_API void smp_transport_cancel(smp_transport*, uint64_t id);

/* Ends every pending operation with SMP_CANCELLED and the given reason. */
SMP_API void smp_transport_cancel_all(smp_transport*, const char* reason);

/* What this rank is doing, told to peers that wait for it. Cheap. */
SMP_API void smp_transport_begin_step(smp_transport*, uint64_t program, int64_t step);
SMP_API void smp_transport_end_step(smp_transport*, uint64_t program);

/* Waits until this rank has begun (`ended` = 0) or ended a step of a program, or is beyond it;
 * SMP_DEADLINE_EXCEEDED after `timeout_s`, or once smp_transport_stop_awaiting was called, which
 * ends all of these waits, now and later. */
SMP_API int smp_transport_await_step(smp_transport*, uint64_t program, int64_t step, int ended,
                                     double timeout_s);
SMP_API void smp_transport_stop_awaiting(smp_transport*);

SMP_API void smp_transport_set_activity(smp_transport*, const char* activity);

/* This rank has come to, and is through, something that other ranks take part in by the same name,
 * outside the transport: told to whom asks, so that who has not come to it is known. */
SMP_API void smp_transport_begin_collective(smp_transport*, const char* name);
SMP_API void smp_transport_end_collective(smp_transport*, const char* name);

/* Says which ranks take part in a program, so that only their early leaving disturbs its steps.
 * Without it, all ranks do. */
SMP_API void smp_transport_set_program_ranks(smp_transport*, uint64_t program,
                                             const uint32_t* ranks, size_t count);

/* Says which ranks this one averages with in the steps of a program, which may bear another number
 * there: all call such steps in one order, so a step of it can never end once one of them has left
 * after fewer of them. */
SMP_API void smp_transport_set_averaging_ranks(smp_transport*, uint64_t program,
                                               const uint32_t* ranks, size_t count);

/* Tells all ranks that this one leaves in good order; waits up to `timeout_s` for it to be sent. A
 * rank that waits for this one, or is in a step that this one never began, or begins one later,
 * fails. */
SMP_API int smp_transport_goodbye(smp_transport*, double timeout_s);

/* Waits until every one of `ranks` has said goodbye or its process is gone, or the job has failed;
 * SMP_DEADLINE_EXCEEDED when that takes longer than `timeout_s`. */
SMP_API int smp_transport_await_goodbyes(smp_transport*, const uint32_t* ranks, size_t count,
                                         double timeout_s);

/* Makes `cause_json` (an object with at least "message", which is cut where all of it is more than
 * 4 KiB) the cause, unless there is one; tells all ranks; every process of the job that does not
 * end by itself within the grace time ends with `exit_code`. Waits up to `timeout_s` for the
 * message to be sent. */
SMP_API int smp_transport_abort(smp_transport*, const char* cause_json, int exit_code,
                                double timeout_s);

/* Holds the line that tells the cause for so many seconds: whoever prints a traceback lets it go
 * behind that, with 0. It is out when this returns then, if there is a cause. A signal that ends
 * the process lets it go, too. */
SMP_API void smp_transport_hold_words(smp_transport*, double seconds);

/* The cause as JSON, or "" while all is well. Returns the bytes needed, with the end. */
SMP_API size_t smp_transport_cause(smp_transport*, char* out, size_t bytes);

/* What a rank is doing, as JSON (under 4 KiB): rank, clock_ns (of its host's monotonic clock, when
 * it answered), in_step, program, step, step_seconds, averages, activity, activity_seconds,
 * collectives (hashes of the names of what it has come to and is not through, the first ones
 * first), more_collectives (whether there are others), collective (the first one's name),
 * collective_seconds (since it came to that), and in waits the oldest operation that waits for each
 * peer: peer, is_send, label, program, step, microbatch, seconds. Its progress thread answers,
 * whatever its other threads are stuck in. SMP_OK, or SMP_DEADLINE_EXCEEDED if no answer comes.
 * Blocks. */
SMP_API int smp_transport_ask(smp_transport*, uint32_t rank, double timeout_s, char* out,
                              size_t bytes);

/* Messages and bytes per peer and per edge, lanes, refused messages, CPU time of the progress
 * thread, as JSON. Returns the bytes needed, with the end. */
SMP_API size_t smp_transport_stats(smp_transport*, char* out, size_t bytes);

/* Names of the UCX transports in use to a peer, such as "posix". Returns the bytes needed. */
SMP_API size_t smp_transport_lanes(smp_transport*, uint32_t peer, char* out, size_t bytes);

/* Ends all operations and threads. What is called afterwards, or meanwhile by other threads, does
 * nothing or fails: an operation ends with an error, inside the call that brings it. Waits for a
 * copy, or a `done` or `release`, that a thread of the transport is in: for stall_timeout at most;
 * it says so when that is over, and nothing is ever freed then. */
SMP_API void smp_transport_shutdown(smp_transport*);

/* The same, and frees the transport once nobody holds it. */
SMP_API void smp_transport_destroy(smp_transport*);

/* The process's transport, as the TensorFlow ops find it: the last one that was made current.
 * acquire returns NULL if there is none; what was acquired must be released. */
SMP_API void smp_transport_make_current(smp_transport*);
SMP_API smp_transport* smp_transport_acquire(void);
SMP_API void smp_transport_release(smp_transport*);

/* Whole messages for callers that wait: start, wait (in slices, as long as they like), take. */
typedef struct smp_operation smp_operation;
SMP_API smp_operation* smp_operation_send(smp_transport*, uint32_t destination, smp_key key,
                                          const char* label, const void* data, uint64_t bytes);
SMP_API smp_operation* smp_operation_recv(smp_transport*, uint32_t source, smp_key key,
                                          const char* label);
/* -1 while it runs, else its status code. Blocks up to `timeout_s`. */
SMP_API int smp_operation_wait(smp_operation*, double timeout_s);
SMP_API void smp_operation_cancel(smp_operation*);
/* Cancels a receive whose message has not come. One that is on its way goes on, and can be waited
 * for later. */
SMP_API void smp_operation_withdraw(smp_operation*);
SMP_API const char* smp_operation_message(smp_operation*);
/* The received bytes; the caller owns them and frees them with smp_bytes_free. */
SMP_API void* smp_operation_take(smp_operation*, uint64_t* bytes);
SMP_API void smp_bytes_free(void*);
/* 1 if the buffer of a send is no longer in use. */
SMP_API int smp_operation_released(smp_operation*);
SMP_API void smp_operation_free(smp_operation*);

#ifdef __cplusplus
}
#endif

#endif /* SMP_TF_OPS_CC_TRANSPORT_SMP_TRANSPORT_H_ */
