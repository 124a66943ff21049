/* SPDX-License-Identifier: Apache-2.0
 *
 * A simulated libnvidia-ml.so.1.
 *
 * The GPUs of a node live in one file that every process maps: the agent reads them through NVML's
 * own functions, workers enter their load through hwsim_step, tests break them through the other
 * hwsim_* functions. The file's layout is known to this source only.
 *
 * Power is constant between known edges (start of a step, end of computing, end of communicating,
 * a call that changes something). So each call first integrates exactly from the last call to now,
 * and nothing has to run in between.
 *
 * A load is registered with its end. When its process dies, the load ends when the next call of any
 * process finds it dead, at the latest where it would have ended anyway.
 *
 * Two things make kill -9 at any instruction harmless: the lock is a record lock of the file, which
 * the kernel takes from a dead holder; and all that changes of a GPU is kept twice, written to the
 * copy that is not in use, and made valid by one store.
 *
 * Every user can write to the file, and the agent may run as root. So nothing in it is ever used as
 * an address or as an unchecked index (which is why the lock is not a mutex in the file: the C
 * library keeps pointers in those), and a GPU is worked on in private memory.
 *
 * Values in the file are SI units (joules, watts, seconds); NVML's mW and mJ exist only in answers.
 * Prototypes and structs are written here from NVIDIA's public documentation of the interface.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))

enum {
    SUCCESS = 0,
    UNINITIALIZED = 1,
    INVALID_ARGUMENT = 2,
    NOT_SUPPORTED = 3,
    NO_PERMISSION = 4,
    NOT_FOUND = 6,
    INSUFFICIENT_SIZE = 7,
    DRIVER_NOT_LOADED = 9,
    TIMEOUT = 10,
    GPU_IS_LOST = 15,
    RESET_REQUIRED = 16,
    OPERATING_SYSTEM = 17,
    LIB_RM_VERSION_MISMATCH = 18,
    INSUFFICIENT_RESOURCES = 23,
    ARGUMENT_VERSION_MISMATCH = 25,
};

/* ---- what NVML's callers pass ------------------------------------------------------------- */

typedef const char *nvmlDevice_t;

typedef struct {
    unsigned gpu, memory;
} nvmlUtilization_t;

typedef struct {
    uint64_t total, free, used;
} nvmlMemory_t;

typedef struct {
    unsigned version;
    uint64_t total, reserved, free, used;
} nvmlMemory_v2_t;

typedef struct {
    unsigned pid;
    uint64_t used_memory;
    unsigned gpu_instance, compute_instance;
} nvmlProcessInfo_t;

typedef struct {
    char bus_id_legacy[16];
    unsigned domain, bus, device, device_id, subsystem_id;
    char bus_id[32];
} nvmlPciInfo_t;

typedef struct {
    unsigned field, scope;
    int64_t timestamp_us, latency_us;
    unsigned type;
    int result;
    union {
        double d;
        unsigned ui;
        uint64_t ull;
    } value;
} nvmlFieldValue_t;

typedef struct {
    unsigned version, sensor;
    int celsius;
} nvmlTemperature_v1_t;

_Static_assert(sizeof(nvmlMemory_v2_t) == 40, "layout of nvmlMemory_v2_t");
_Static_assert(sizeof(nvmlProcessInfo_t) == 24, "layout of nvmlProcessInfo_t");
_Static_assert(sizeof(nvmlPciInfo_t) == 68, "layout of nvmlPciInfo_t");
_Static_assert(sizeof(nvmlFieldValue_t) == 40, "layout of nvmlFieldValue_t");

#define STRUCT_VERSION(type, number) ((unsigned)sizeof(type) | ((unsigned)(number) << 24))
#define NO_INSTANCE 0xFFFFFFFFu

/* ---- the state file ------------------------------------------------------------------------ */

#define MAGIC 0x54415752484d4953ull /* "SIMHRWAT" */
#define LAYOUT 2u
#define MAX_GPUS 1024u
#define MAX_PROCESSES 32u
#define NAME_BYTES 96
#define UUID_BYTES 96

/* The real counter moves about every 100 ms. */
#define PUBLISH_PERIOD_S 0.1
/* Readings follow true power like a first-order filter. Its rise from 10 to 90 % takes 2.2 time
 * constants: 0.88 s, as measured on GPUs that report a 1 s average. Its integral equals that of the
 * true power but for one time constant at the edges of a run. */
#define AVERAGE_TIME_CONSTANT_S 0.4
#define CONTEXT_MEMORY_BYTES (512ull << 20)
#define LOCK_PAUSE_NS 100000
#define LOCK_PAUSES 50000 /* together at least 5 s */

/* Every function that can be told to fail for one GPU. */
#define FUNCTIONS(X)                                                                               \
    X(nvmlDeviceGetHandleByIndex)                                                                  \
    X(nvmlDeviceGetHandleByUUID)                                                                   \
    X(nvmlDeviceGetHandleByPciBusId)                                                               \
    X(nvmlDeviceGetIndex)                                                                          \
    X(nvmlDeviceGetName)                                                                           \
    X(nvmlDeviceGetUUID)                                                                           \
    X(nvmlDeviceGetArchitecture)                                                                   \
    X(nvmlDeviceGetCudaComputeCapability)                                                          \
    X(nvmlDeviceGetPciInfo)                                                                        \
    X(nvmlDeviceGetPowerUsage)                                                                     \
    X(nvmlDeviceGetTotalEnergyConsumption)                                                         \
    X(nvmlDeviceGetFieldValues)                                                                    \
    X(nvmlDeviceGetPowerManagementMode)                                                            \
    X(nvmlDeviceGetPowerManagementLimit)                                                           \
    X(nvmlDeviceGetPowerManagementLimitConstraints)                                                \
    X(nvmlDeviceGetPowerManagementDefaultLimit)                                                    \
    X(nvmlDeviceGetEnforcedPowerLimit)                                                             \
    X(nvmlDeviceSetPowerManagementLimit)                                                           \
    X(nvmlDeviceGetUtilizationRates)                                                               \
    X(nvmlDeviceGetMemoryInfo)                                                                     \
    X(nvmlDeviceGetComputeRunningProcesses)                                                        \
    X(nvmlDeviceGetGraphicsRunningProcesses)                                                       \
    X(nvmlDeviceGetTemperature)                                                                    \
    X(nvmlDeviceGetClockInfo)                                                                      \
    X(nvmlDeviceGetMaxClockInfo)                                                                   \
    X(nvmlDeviceGetCurrentClocksEventReasons)                                                      \
    X(nvmlDeviceGetPersistenceMode)                                                                \
    X(nvmlDeviceGetPerformanceState)                                                               \
    X(nvmlDeviceGetComputeMode)                                                                    \
    X(nvmlDeviceGetTotalEccErrors)                                                                 \
    X(nvmlDeviceGetRemappedRows)                                                                   \
    X(unsupported)                                                                                 \
    X(control)

#define AS_ENUM(name) F_##name,
#define AS_STRING(name) #name,
enum function { FUNCTIONS(AS_ENUM) FUNCTION_COUNT };
static const char *const FUNCTION_NAMES[] = {FUNCTIONS(AS_STRING)};

/* Configuration keys, in the order in which hwsim_create takes their values. */
#define SPECIFICATION(X)                                                                           \
    X(idle_w)                                                                                      \
    X(context_w)                                                                                   \
    X(demand_w)                                                                                    \
    X(floor_w)                                                                                     \
    X(beta)                                                                                        \
    X(default_limit_w)                                                                             \
    X(min_limit_w)                                                                                 \
    X(max_limit_w)                                                                                 \
    X(speed_flop_per_s)                                                                            \
    X(link_bytes_per_s)                                                                            \
    X(link_w)                                                                                      \
    X(memory_bytes)

#define AS_FIELD(name) double name;
#define AS_KEY(name) "," #name
struct specification {
    SPECIFICATION(AS_FIELD)
};
#define SPECIFICATION_VALUES (sizeof(struct specification) / sizeof(double))

struct process {
    int pid;
    uint64_t started; /* of /proc/PID/stat, in clock ticks: tells a reused pid apart; 0 unknown */
    double start_s, compute_end_s, link_end_s; /* its one load; all 0 when it has none */
    uint64_t memory_bytes;
};

struct live {
    double at_s;       /* everything below holds at this time */
    double energy_j;   /* integral of true power since creation */
    double counter_zero_j; /* energy at the last reset of the counter */
    double published_j;    /* what the counter shows */
    double average_w;      /* filtered power */
    double average_busy;   /* filtered share of time with load, 0 to 1 */
    double limit_w;        /* requested */
    double out_of_band_w;  /* 0: none */
    int lost;              /* 0, GPU_IS_LOST or RESET_REQUIRED */
    int counter_reads_zero;
    uint64_t ownerless_bytes; /* memory in use by no process that is listed */
    unsigned uncorrectable_errors, remap_pending;
    int recovery_action; /* NVML_GPU_RECOVERY_ACTION_* */
    int errors[FUNCTION_COUNT];
    unsigned process_count;
    struct process processes[MAX_PROCESSES];
};

struct gpu {
    char uuid[UUID_BYTES], name[NAME_BYTES];
    struct specification spec;
    unsigned current; /* which of the two is valid */
    struct live copies[2];
};

struct state {
    uint64_t magic;
    unsigned layout, gpu_count;
    int init_error, allow_nonroot;
    int clock_is_virtual;
    double clock_s;
    struct gpu gpus[];
};

/* ---- this process --------------------------------------------------------------------------- */

static pthread_mutex_t process_mutex = PTHREAD_MUTEX_INITIALIZER;
static int state_fd = -1;
static struct state *state;
static unsigned state_gpus; /* kept here, since other processes can write to the file */
static size_t state_bytes;
static dev_t state_device;
static ino_t state_inode;
static unsigned init_count;
static struct live draft; /* of the GPU that is worked on; under process_mutex */
/* A handle is the address of a byte here: it can be checked, and says nothing about the mapping. */
static const char handles[MAX_GPUS];

static size_t bytes_for(unsigned gpus)
{
    return sizeof(struct state) + gpus * sizeof(struct gpu);
}

static struct state *map_file(int fd, int *code, struct stat *status, unsigned *gpus)
{
    struct state *mapped = MAP_FAILED;
    *code = DRIVER_NOT_LOADED;
    if (fstat(fd, status) == 0 && S_ISREG(status->st_mode)
        && (size_t)status->st_size >= sizeof(struct state)) {
        mapped = mmap(NULL, (size_t)status->st_size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    }
    if (mapped == MAP_FAILED) {
        return NULL;
    }
    *gpus = mapped->gpu_count;
    if (mapped->magic == MAGIC && mapped->layout != LAYOUT) {
        *code = LIB_RM_VERSION_MISMATCH;
    } else if (mapped->magic == MAGIC && *gpus <= MAX_GPUS
               && bytes_for(*gpus) == (size_t)status->st_size) {
        *code = SUCCESS;
        return mapped;
    }
    munmap(mapped, (size_t)status->st_size);
    return NULL;
}

/* Map the file that the environment names, unless it is mapped. While NVML is initialised the
 * mapping stays what it is. */
static int open_state(void)
{
    const char *path = getenv("HOROWATT_SIM_STATE");
    struct stat status;
    struct state *mapped;
    unsigned gpus;
    int code, fd;
    if (state != NULL && init_count > 0) {
        return SUCCESS;
    }
    if (path == NULL || stat(path, &status) != 0) {
        return DRIVER_NOT_LOADED;
    }
    if (state != NULL && status.st_dev == state_device && status.st_ino == state_inode) {
        return SUCCESS;
    }
    fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0) {
        return DRIVER_NOT_LOADED;
    }
    mapped = map_file(fd, &code, &status, &gpus);
    if (mapped == NULL) {
        close(fd);
        return code;
    }
    if (state != NULL) {
        munmap(state, state_bytes);
        close(state_fd);
    }
    state = mapped;
    state_fd = fd;
    state_gpus = gpus;
    state_bytes = (size_t)status.st_size;
    state_device = status.st_dev;
    state_inode = status.st_ino;
    return SUCCESS;
}

/* A process that was forked while another thread held the mutex must not wait for it for ever. The
 * record lock is not inherited. */
static void renew_process_mutex(void)
{
    pthread_mutex_init(&process_mutex, NULL);
}

__attribute__((constructor)) static void prepare_for_forks(void)
{
    pthread_atfork(NULL, NULL, renew_process_mutex);
}

/* Record locks exclude processes, the mutex excludes this process's threads. */
static int lock_state(void)
{
    struct flock whole = {.l_type = F_WRLCK, .l_whence = SEEK_SET};
    const struct timespec pause = {.tv_nsec = LOCK_PAUSE_NS};
    long pauses = 0;
    pthread_mutex_lock(&process_mutex);
    /* Not F_SETLKW: whoever may write to the file could make the agent wait for ever. */
    while (fcntl(state_fd, F_SETLK, &whole) != 0) {
        if ((errno != EAGAIN && errno != EACCES && errno != EINTR) || pauses == LOCK_PAUSES) {
            pthread_mutex_unlock(&process_mutex);
            return pauses == LOCK_PAUSES ? TIMEOUT : OPERATING_SYSTEM;
        }
        nanosleep(&pause, NULL);
        pauses++;
    }
    return SUCCESS;
}

static void unlock_state(void)
{
    struct flock whole = {.l_type = F_UNLCK, .l_whence = SEEK_SET};
    fcntl(state_fd, F_SETLK, &whole);
    pthread_mutex_unlock(&process_mutex);
}

static double now_of(const struct state *shared)
{
    struct timespec now;
    if (shared->clock_is_virtual) {
        return shared->clock_s;
    }
    /* Not the wall clock: a device uses no energy because somebody corrects the time. */
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* ---- physics ---------------------------------------------------------------------------------- */

static double enforced_limit_w(const struct live *live)
{
    if (live->out_of_band_w > 0 && live->out_of_band_w < live->limit_w) {
        return live->out_of_band_w;
    }
    return live->limit_w;
}

static double speed_share(const struct specification *spec, double limit_w)
{
    if (limit_w >= spec->demand_w) {
        return 1.0;
    }
    return pow((limit_w - spec->floor_w) / (spec->demand_w - spec->floor_w), spec->beta);
}

enum phase { IDLE, COMPUTE, LINK };

/* What the GPU does from time t on, and until when that stays so. */
static enum phase phase_at(const struct live *live, double t, double *until)
{
    enum phase phase = IDLE;
    for (unsigned i = 0; i < live->process_count; i++) {
        const struct process *process = &live->processes[i];
        const double edges[] = {process->start_s, process->compute_end_s, process->link_end_s};
        for (unsigned e = 0; e < 3; e++) {
            if (edges[e] > t && edges[e] < *until) {
                *until = edges[e];
            }
        }
        if (process->start_s <= t && t < process->link_end_s) {
            phase = t < process->compute_end_s ? COMPUTE : LINK;
        }
    }
    return phase;
}

static double power_w(const struct gpu *gpu, const struct live *live, enum phase phase)
{
    const struct specification *spec = &gpu->spec;
    double base = spec->idle_w + (live->process_count > 0 ? spec->context_w : 0.0);
    double wanted = phase == COMPUTE ? spec->demand_w : phase == LINK ? spec->link_w : base;
    return fmax(base, fmin(wanted, enforced_limit_w(live)));
}

/* Bring the copy up to now: exact integral, publications of the counter, filters. */
static void integrate(const struct gpu *gpu, struct live *live, double now)
{
    double t = live->at_s;
    double publish_at = floor(now / PUBLISH_PERIOD_S) * PUBLISH_PERIOD_S;
    while (t < now) {
        double next = publish_at > t ? publish_at : now;
        enum phase phase = phase_at(live, t, &next);
        double watts = power_w(gpu, live, phase);
        double kept = exp(-(next - t) / AVERAGE_TIME_CONSTANT_S);
        live->energy_j += watts * (next - t);
        live->average_w = watts + (live->average_w - watts) * kept;
        live->average_busy = (phase != IDLE) + (live->average_busy - (phase != IDLE)) * kept;
        t = next;
        if (t == publish_at) {
            live->published_j = live->energy_j - live->counter_zero_j;
        }
    }
    /* Also back: the machine was started again, and its clock with it. */
    live->at_s = now;
}

/* ---- processes ---------------------------------------------------------------------------------- */

/* Returns 0 when there is no such process; a process that waits to be reaped counts as none. */
static int process_lives(int pid, uint64_t *started)
{
    char path[64], text[1024];
    char *rest;
    ssize_t length;
    int fd;
    *started = 0;
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) {
        /* /proc may hide other users' processes; the kernel still tells whether they exist. */
        return pid > 0 && (kill(pid, 0) == 0 || errno == EPERM);
    }
    length = read(fd, text, sizeof text - 1);
    close(fd);
    if (length <= 0) {
        return 0;
    }
    text[length] = '\0';
    /* The name in parentheses may hold anything, so count fields from its end. */
    rest = strrchr(text, ')');
    if (rest == NULL || rest[1] == '\0' || rest[2] == 'Z' || rest[2] == 'X') {
        return 0;
    }
    rest += 2;
    for (int field = 3; field < 22 && rest != NULL; field++) {
        rest = strchr(rest + 1, ' ');
    }
    if (rest != NULL) {
        *started = strtoull(rest, NULL, 10);
    }
    return 1;
}

static void remove_process(struct live *live, unsigned index)
{
    live->process_count--;
    live->processes[index] = live->processes[live->process_count];
    memset(&live->processes[live->process_count], 0, sizeof(struct process));
}

static void drop_dead(struct live *live)
{
    unsigned i = 0;
    while (i < live->process_count) {
        uint64_t started;
        const struct process *process = &live->processes[i];
        int same = process_lives(process->pid, &started)
            && (started == process->started || started == 0 || process->started == 0);
        if (same) {
            i++;
        } else {
            remove_process(live, i);
        }
    }
}

static struct process *find_process(struct live *live, int pid)
{
    for (unsigned i = 0; i < live->process_count; i++) {
        if (live->processes[i].pid == pid) {
            return &live->processes[i];
        }
    }
    return NULL;
}

static int add_process(struct live *live, int pid, struct process **added)
{
    uint64_t started;
    *added = find_process(live, pid);
    if (*added != NULL) {
        return SUCCESS;
    }
    if (pid <= 0 || !process_lives(pid, &started)) {
        return INVALID_ARGUMENT;
    }
    if (live->process_count >= MAX_PROCESSES) {
        return INSUFFICIENT_RESOURCES;
    }
    *added = &live->processes[live->process_count++];
    memset(*added, 0, sizeof **added);
    (*added)->pid = pid;
    (*added)->started = started;
    (*added)->memory_bytes = CONTEXT_MEMORY_BYTES;
    return SUCCESS;
}

/* ---- one change or reading of a GPU -------------------------------------------------------------- */

static void read_draft(const struct gpu *gpu)
{
    draft = gpu->copies[gpu->current & 1u];
    if (draft.process_count > MAX_PROCESSES) {
        draft.process_count = MAX_PROCESSES;
    }
}

static void commit_draft(struct gpu *gpu)
{
    unsigned other = 1u - (gpu->current & 1u);
    gpu->copies[other] = draft;
    __atomic_store_n(&gpu->current, other, __ATOMIC_RELEASE);
}

static void bring_up_to_now(const struct gpu *gpu)
{
    read_draft(gpu);
    integrate(gpu, &draft, now_of(state));
    drop_dead(&draft);
}

/* Lock, bring the draft of the GPU up to now; the lock is held only on SUCCESS. */
static int begin(unsigned index, enum function function, struct gpu **gpu, struct live **live)
{
    int code = lock_state();
    if (code != SUCCESS) {
        return code;
    }
    *gpu = &state->gpus[index];
    bring_up_to_now(*gpu);
    *live = &draft;
    code = (*live)->errors[function];
    if ((*live)->lost != 0 && function != F_control) {
        code = (*live)->lost;
    }
    if (code != SUCCESS) {
        commit_draft(*gpu);
        unlock_state();
    }
    return code;
}

static void end(struct gpu *gpu)
{
    commit_draft(gpu);
    unlock_state();
}

static int index_of(nvmlDevice_t device, unsigned *index)
{
    if (__atomic_load_n(&init_count, __ATOMIC_ACQUIRE) == 0) {
        return UNINITIALIZED;
    }
    if ((uintptr_t)device < (uintptr_t)handles
        || (uintptr_t)device >= (uintptr_t)handles + state_gpus) {
        return INVALID_ARGUMENT;
    }
    *index = (unsigned)((uintptr_t)device - (uintptr_t)handles);
    return SUCCESS;
}

/* Opens a function about one GPU: from here to END, gpu and live are its draft under the lock. */
#define BEGIN(device, function, pointers_are_valid)                                                \
    unsigned index;                                                                                \
    struct gpu *gpu;                                                                               \
    struct live *live;                                                                             \
    int code = index_of(device, &index);                                                           \
    if (code == SUCCESS && !(pointers_are_valid)) {                                                \
        code = INVALID_ARGUMENT;                                                                   \
    }                                                                                              \
    if (code == SUCCESS) {                                                                         \
        code = begin(index, F_##function, &gpu, &live);                                            \
    }                                                                                              \
    if (code != SUCCESS) {                                                                         \
        return code;                                                                               \
    }

#define END(result)                                                                                \
    end(gpu);                                                                                      \
    return result

static unsigned milli(double value)
{
    return (unsigned)llround(value * 1e3);
}

static int copy_text(char *buffer, unsigned length, const char *text)
{
    size_t bytes = strnlen(text, UUID_BYTES - 1);
    if (length <= bytes) {
        return INSUFFICIENT_SIZE;
    }
    memcpy(buffer, text, bytes);
    buffer[bytes] = '\0';
    return SUCCESS;
}

/* ---- NVML: the library ------------------------------------------------------------------------------ */

EXPORT int nvmlInitWithFlags(unsigned flags)
{
    int code;
    (void)flags;
    pthread_mutex_lock(&process_mutex);
    code = open_state();
    if (code == SUCCESS) {
        code = state->init_error;
    }
    if (code == SUCCESS) {
        __atomic_add_fetch(&init_count, 1u, __ATOMIC_RELEASE);
    }
    pthread_mutex_unlock(&process_mutex);
    return code;
}

EXPORT int nvmlInit_v2(void)
{
    return nvmlInitWithFlags(0);
}

EXPORT int nvmlInit(void)
{
    return nvmlInitWithFlags(0);
}

EXPORT int nvmlShutdown(void)
{
    int code = UNINITIALIZED;
    pthread_mutex_lock(&process_mutex);
    if (init_count > 0) {
        __atomic_sub_fetch(&init_count, 1u, __ATOMIC_RELEASE);
        code = SUCCESS;
    }
    pthread_mutex_unlock(&process_mutex);
    return code;
}

EXPORT const char *nvmlErrorString(int code)
{
    switch (code) {
    case SUCCESS: return "Success";
    case UNINITIALIZED: return "Uninitialized";
    case INVALID_ARGUMENT: return "Invalid Argument";
    case NOT_SUPPORTED: return "Not Supported";
    case NO_PERMISSION: return "Insufficient Permissions";
    case NOT_FOUND: return "Not Found";
    case INSUFFICIENT_SIZE: return "Insufficient Size";
    case DRIVER_NOT_LOADED: return "Driver Not Loaded";
    case TIMEOUT: return "Timeout";
    case GPU_IS_LOST: return "GPU is lost";
    case RESET_REQUIRED: return "GPU requires reset";
    case OPERATING_SYSTEM: return "The operating system has blocked the request.";
    case LIB_RM_VERSION_MISMATCH: return "Driver/library version mismatch";
    case INSUFFICIENT_RESOURCES: return "Insufficient Resources";
    case ARGUMENT_VERSION_MISMATCH: return "Argument version mismatch";
    default: return "Unknown Error";
    }
}

static int system_text(char *buffer, unsigned length, const char *text)
{
    if (init_count == 0) {
        return UNINITIALIZED;
    }
    return buffer == NULL ? INVALID_ARGUMENT : copy_text(buffer, length, text);
}

EXPORT int nvmlSystemGetDriverVersion(char *buffer, unsigned length)
{
    return system_text(buffer, length, "580.00.00-simulated");
}

EXPORT int nvmlSystemGetNVMLVersion(char *buffer, unsigned length)
{
    return system_text(buffer, length, "13.580.00.00-simulated");
}

EXPORT int nvmlSystemGetCudaDriverVersion(int *version)
{
    if (version == NULL) {
        return INVALID_ARGUMENT;
    }
    *version = 13000;
    return SUCCESS;
}

EXPORT int nvmlSystemGetCudaDriverVersion_v2(int *version)
{
    return nvmlSystemGetCudaDriverVersion(version);
}

EXPORT int nvmlDeviceGetCount_v2(unsigned *count)
{
    if (init_count == 0) {
        return UNINITIALIZED;
    }
    if (count == NULL) {
        return INVALID_ARGUMENT;
    }
    *count = state_gpus;
    return SUCCESS;
}

EXPORT int nvmlDeviceGetCount(unsigned *count)
{
    return nvmlDeviceGetCount_v2(count);
}

/* ---- NVML: handles and identity ----------------------------------------------------------------------- */

static int hand_out(unsigned index, enum function function, nvmlDevice_t *device)
{
    struct gpu *gpu;
    struct live *live;
    int code = begin(index, function, &gpu, &live);
    if (code != SUCCESS) {
        return code;
    }
    *device = &handles[index];
    END(SUCCESS);
}

EXPORT int nvmlDeviceGetHandleByIndex_v2(unsigned index, nvmlDevice_t *device)
{
    if (init_count == 0) {
        return UNINITIALIZED;
    }
    if (device == NULL || index >= state_gpus) {
        return INVALID_ARGUMENT;
    }
    return hand_out(index, F_nvmlDeviceGetHandleByIndex, device);
}

EXPORT int nvmlDeviceGetHandleByIndex(unsigned index, nvmlDevice_t *device)
{
    return nvmlDeviceGetHandleByIndex_v2(index, device);
}

static int find_uuid(const char *uuid, unsigned *index)
{
    for (unsigned i = 0; i < state_gpus; i++) {
        if (strncmp(state->gpus[i].uuid, uuid, UUID_BYTES) == 0) {
            *index = i;
            return SUCCESS;
        }
    }
    return NOT_FOUND;
}

EXPORT int nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *device)
{
    unsigned index;
    if (init_count == 0) {
        return UNINITIALIZED;
    }
    if (uuid == NULL || device == NULL) {
        return INVALID_ARGUMENT;
    }
    if (find_uuid(uuid, &index) != SUCCESS) {
        return NOT_FOUND;
    }
    return hand_out(index, F_nvmlDeviceGetHandleByUUID, device);
}

static void bus_id(unsigned index, char *text, size_t length)
{
    snprintf(text, length, "%08X:%02X:%02X.0", index / 255u, 1u + index % 255u, 0u);
}

EXPORT int nvmlDeviceGetHandleByPciBusId_v2(const char *wanted, nvmlDevice_t *device)
{
    char text[32];
    if (init_count == 0) {
        return UNINITIALIZED;
    }
    if (wanted == NULL || device == NULL) {
        return INVALID_ARGUMENT;
    }
    for (unsigned i = 0; i < state_gpus; i++) {
        bus_id(i, text, sizeof text);
        if (strcasecmp(text, wanted) == 0) {
            return hand_out(i, F_nvmlDeviceGetHandleByPciBusId, device);
        }
    }
    return NOT_FOUND;
}

EXPORT int nvmlDeviceGetIndex(nvmlDevice_t device, unsigned *position)
{
    BEGIN(device, nvmlDeviceGetIndex, position != NULL)
    *position = index;
    END(SUCCESS);
}

EXPORT int nvmlDeviceGetName(nvmlDevice_t device, char *buffer, unsigned length)
{
    BEGIN(device, nvmlDeviceGetName, buffer != NULL)
    code = copy_text(buffer, length, gpu->name);
    END(code);
}

EXPORT int nvmlDeviceGetUUID(nvmlDevice_t device, char *buffer, unsigned length)
{
    BEGIN(device, nvmlDeviceGetUUID, buffer != NULL)
    code = copy_text(buffer, length, gpu->uuid);
    END(code);
}

EXPORT int nvmlDeviceGetArchitecture(nvmlDevice_t device, unsigned *architecture)
{
    BEGIN(device, nvmlDeviceGetArchitecture, architecture != NULL)
    *architecture = 7; /* Ampere */
    END(SUCCESS);
}

EXPORT int nvmlDeviceGetCudaComputeCapability(nvmlDevice_t device, int *major, int *minor)
{
    BEGIN(device, nvmlDeviceGetCudaComputeCapability, major != NULL && minor != NULL)
    *major = 8;
    *minor = 0;
    END(SUCCESS);
}

EXPORT int nvmlDeviceGetPciInfo_v3(nvmlDevice_t device, nvmlPciInfo_t *info)
{
    BEGIN(device, nvmlDeviceGetPciInfo, info != NULL)
    memset(info, 0, sizeof *info);
    info->domain = index / 255u;
    info->bus = 1u + index % 255u;
    info->device_id = 0x20B010DEu;
    bus_id(index, info->bus_id, sizeof info->bus_id);
    snprintf(info->bus_id_legacy, sizeof info->bus_id_legacy, "%04X:%02X:00.0",
        info->domain & 0xFFFFu, info->bus & 0xFFu);
    END(SUCCESS);
}

EXPORT int nvmlDeviceGetPciInfo_v2(nvmlDevice_t device, nvmlPciInfo_t *info)
{
    return nvmlDeviceGetPciInfo_v3(device, info);
}

/* ---- NVML: power and energy ------------------------------------------------------------------------------ */

static uint64_t counter_mj(const struct live *live)
{
    return live->counter_reads_zero ? 0 : (uint64_t)(live->published_j * 1e3);
}

static double power_now_w(const struct gpu *gpu, const struct live *live)
{
    double until = INFINITY;
    enum phase phase = phase_at(live, live->at_s, &until);
    return power_w(gpu, live, phase);
}

EXPORT int nvmlDeviceGetPowerUsage(nvmlDevice_t device, unsigned *milliwatts)
{
    BEGIN(device, nvmlDeviceGetPowerUsage, milliwatts != NULL)
    *milliwatts = milli(live->average_w);
    END(SUCCESS);
}

EXPORT int nvmlDeviceGetTotalEnergyConsumption(nvmlDevice_t device, uint64_t *millijoules)
{
    BEGIN(device, nvmlDeviceGetTotalEnergyConsumption, millijoules != NULL)
    *millijoules = counter_mj(live);
    END(SUCCESS);
}

enum { VALUE_UNSIGNED_INT = 1, VALUE_UNSIGNED_LONG_LONG = 3 };

static void answer_field(const struct gpu *gpu, const struct live *live, nvmlFieldValue_t *field)
{
    const int *errors = live->errors;
    field->type = VALUE_UNSIGNED_INT;
    field->result = SUCCESS;
    field->value.ull = 0;
    switch (field->field) {
    case 83:
    case 191:
        field->result = errors[F_nvmlDeviceGetTotalEnergyConsumption];
        field->type = VALUE_UNSIGNED_LONG_LONG;
        field->value.ull = counter_mj(live);
        break;
    case 185:
        field->result = errors[F_nvmlDeviceGetPowerUsage];
        field->value.ui = milli(live->average_w);
        break;
    case 186:
        field->result = errors[F_nvmlDeviceGetPowerUsage];
        field->value.ui = milli(power_now_w(gpu, live));
        break;
    case 187:
        field->value.ui = milli(gpu->spec.min_limit_w);
        break;
    case 188:
        field->value.ui = milli(gpu->spec.max_limit_w);
        break;
    case 189:
        field->value.ui = milli(gpu->spec.default_limit_w);
        break;
    case 190:
        field->value.ui = milli(enforced_limit_w(live));
        break;
    case 192:
        field->value.ui = milli(live->limit_w);
        break;
    case 230:
        field->value.ui = (unsigned)live->recovery_action;
        break;
    default:
        field->result = NOT_SUPPORTED;
    }
    if (field->scope != 0) {
        field->result = NOT_SUPPORTED;
    }
}

EXPORT int nvmlDeviceGetFieldValues(nvmlDevice_t device, int count, nvmlFieldValue_t *fields)
{
    struct timespec wall;
    BEGIN(device, nvmlDeviceGetFieldValues, fields != NULL && count > 0)
    clock_gettime(CLOCK_REALTIME, &wall);
    for (int i = 0; i < count; i++) {
        fields[i].timestamp_us = (int64_t)wall.tv_sec * 1000000 + wall.tv_nsec / 1000;
        fields[i].latency_us = 0;
        answer_field(gpu, live, &fields[i]);
    }
    END(SUCCESS);
}

EXPORT int nvmlDeviceGetPowerManagementMode(nvmlDevice_t device, unsigned *mode)
{
    BEGIN(device, nvmlDeviceGetPowerManagementMode, mode != NULL)
    *mode = 1;
    END(SUCCESS);
}

EXPORT int nvmlDeviceGetPowerManagementLimit(nvmlDevice_t device, unsigned *milliwatts)
{
    BEGIN(device, nvmlDeviceGetPowerManagementLimit, milliwatts != NULL)
    *milliwatts = milli(live->limit_w);
    END(SUCCESS);
}

EXPORT int nvmlDeviceGetPowerManagementLimitConstraints(
    nvmlDevice_t device, unsigned *low, unsigned *high)
{
    BEGIN(device, nvmlDeviceGetPowerManagementLimitConstraints, low != NULL && high != NULL)
    *low = milli(gpu->spec.min_limit_w);
    *high = milli(gpu->spec.max_limit_w);
    END(SUCCESS);
}

EXPORT int nvmlDeviceGetPowerManagementDefaultLimit(nvmlDevice_t device, unsigned *milliwatts)
{
    BEGIN(device, nvmlDeviceGetPowerManagementDefaultLimit, milliwatts != NULL)
    *milliwatts = milli(gpu->spec.default_limit_w);
    END(SUCCESS);
}

EXPORT int nvmlDeviceGetEnforcedPowerLimit(nvmlDevice_t device, unsigned *milliwatts)
{
    BEGIN(device, nvmlDeviceGetEnforcedPowerLimit, milliwatts != NULL)
    *milliwatts = milli(enforced_limit_w(live));
    END(SUCCESS);
}

EXPORT int nvmlDeviceSetPowerManagementLimit(nvmlDevice_t device, unsigned milliwatts)
{
    BEGIN(device, nvmlDeviceSetPowerManagementLimit, 1)
    if (geteuid() != 0 && !state->allow_nonroot) {
        code = NO_PERMISSION;
    } else if (milliwatts < milli(gpu->spec.min_limit_w)
               || milliwatts > milli(gpu->spec.max_limit_w)) {
        code = INVALID_ARGUMENT;
    } else {
        live->limit_w = milliwatts / 1e3;
    }
    END(code);
}

/* ---- NVML: load, memory, processes, clocks ------------------------------------------------------------------ */

EXPORT int nvmlDeviceGetUtilizationRates(nvmlDevice_t device, nvmlUtilization_t *rates)
{
    BEGIN(device, nvmlDeviceGetUtilizationRates, rates != NULL)
    rates->gpu = (unsigned)lround(100.0 * live->average_busy);
    rates->memory = rates->gpu / 2u;
    END(SUCCESS);
}

static uint64_t used_bytes(const struct gpu *gpu, const struct live *live)
{
    uint64_t used = live->ownerless_bytes;
    uint64_t total = (uint64_t)gpu->spec.memory_bytes;
    for (unsigned i = 0; i < live->process_count; i++) {
        used += live->processes[i].memory_bytes;
    }
    return used < total ? used : total;
}

EXPORT int nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *memory)
{
    BEGIN(device, nvmlDeviceGetMemoryInfo, memory != NULL)
    memory->total = (uint64_t)gpu->spec.memory_bytes;
    memory->used = used_bytes(gpu, live);
    memory->free = memory->total - memory->used;
    END(SUCCESS);
}

EXPORT int nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, nvmlMemory_v2_t *memory)
{
    if (memory != NULL && memory->version != STRUCT_VERSION(nvmlMemory_v2_t, 2)) {
        return ARGUMENT_VERSION_MISMATCH;
    }
    BEGIN(device, nvmlDeviceGetMemoryInfo, memory != NULL)
    memory->total = (uint64_t)gpu->spec.memory_bytes;
    memory->reserved = 0;
    memory->used = used_bytes(gpu, live);
    memory->free = memory->total - memory->used;
    END(SUCCESS);
}

EXPORT int nvmlDeviceGetComputeRunningProcesses_v3(
    nvmlDevice_t device, unsigned *count, nvmlProcessInfo_t *infos)
{
    unsigned room;
    BEGIN(device, nvmlDeviceGetComputeRunningProcesses, count != NULL)
    room = infos == NULL ? 0 : *count;
    *count = live->process_count;
    if (room < live->process_count) {
        code = INSUFFICIENT_SIZE;
    } else {
        for (unsigned i = 0; i < live->process_count; i++) {
            infos[i].pid = (unsigned)live->processes[i].pid;
            infos[i].used_memory = live->processes[i].memory_bytes;
            infos[i].gpu_instance = infos[i].compute_instance = NO_INSTANCE;
        }
    }
    END(code);
}

EXPORT int nvmlDeviceGetGraphicsRunningProcesses_v3(
    nvmlDevice_t device, unsigned *count, nvmlProcessInfo_t *infos)
{
    (void)infos;
    BEGIN(device, nvmlDeviceGetGraphicsRunningProcesses, count != NULL)
    *count = 0;
    END(SUCCESS);
}

/* A plain linear law of the averaged power; nothing depends on it. */
static int celsius(const struct live *live)
{
    return (int)lround(30.0 + 0.12 * live->average_w);
}

EXPORT int nvmlDeviceGetTemperature(nvmlDevice_t device, unsigned sensor, unsigned *temperature)
{
    BEGIN(device, nvmlDeviceGetTemperature, temperature != NULL && sensor == 0)
    *temperature = (unsigned)celsius(live);
    END(SUCCESS);
}

EXPORT int nvmlDeviceGetTemperatureV(nvmlDevice_t device, nvmlTemperature_v1_t *temperature)
{
    if (temperature != NULL && temperature->version != STRUCT_VERSION(nvmlTemperature_v1_t, 1)) {
        return ARGUMENT_VERSION_MISMATCH;
    }
    BEGIN(device, nvmlDeviceGetTemperature, temperature != NULL && temperature->sensor == 0)
    temperature->celsius = celsius(live);
    END(SUCCESS);
}

/* Graphics, SM, memory, video. */
static const unsigned MAX_CLOCKS_MHZ[] = {1410, 1410, 1215, 1290};
static const unsigned IDLE_CLOCKS_MHZ[] = {210, 210, 1215, 585};

EXPORT int nvmlDeviceGetClockInfo(nvmlDevice_t device, unsigned type, unsigned *megahertz)
{
    double until = INFINITY;
    BEGIN(device, nvmlDeviceGetClockInfo, megahertz != NULL && type < 4)
    *megahertz = IDLE_CLOCKS_MHZ[type];
    if (phase_at(live, live->at_s, &until) != IDLE && type != 2) {
        double share = speed_share(&gpu->spec, enforced_limit_w(live));
        *megahertz = (unsigned)fmax(*megahertz, MAX_CLOCKS_MHZ[type] * share);
    }
    END(SUCCESS);
}

EXPORT int nvmlDeviceGetMaxClockInfo(nvmlDevice_t device, unsigned type, unsigned *megahertz)
{
    BEGIN(device, nvmlDeviceGetMaxClockInfo, megahertz != NULL && type < 4)
    *megahertz = MAX_CLOCKS_MHZ[type];
    END(SUCCESS);
}

EXPORT int nvmlDeviceGetCurrentClocksEventReasons(nvmlDevice_t device, uint64_t *reasons)
{
    double until = INFINITY;
    enum phase phase;
    BEGIN(device, nvmlDeviceGetCurrentClocksEventReasons, reasons != NULL)
    phase = phase_at(live, live->at_s, &until);
    *reasons = phase == IDLE ? 0x1u : 0u;
    if (phase == COMPUTE && enforced_limit_w(live) < gpu->spec.demand_w) {
        *reasons |= 0x4u; /* software power cap */
    }
    END(SUCCESS);
}

EXPORT int nvmlDeviceGetCurrentClocksThrottleReasons(nvmlDevice_t device, uint64_t *reasons)
{
    return nvmlDeviceGetCurrentClocksEventReasons(device, reasons);
}

EXPORT int nvmlDeviceGetPersistenceMode(nvmlDevice_t device, unsigned *mode)
{
    BEGIN(device, nvmlDeviceGetPersistenceMode, mode != NULL)
    *mode = 1;
    END(SUCCESS);
}

EXPORT int nvmlDeviceGetPerformanceState(nvmlDevice_t device, unsigned *performance_state)
{
    BEGIN(device, nvmlDeviceGetPerformanceState, performance_state != NULL)
    *performance_state = live->process_count > 0 ? 0 : 8;
    END(SUCCESS);
}

EXPORT int nvmlDeviceGetComputeMode(nvmlDevice_t device, unsigned *mode)
{
    BEGIN(device, nvmlDeviceGetComputeMode, mode != NULL)
    *mode = 0;
    END(SUCCESS);
}

/* ---- NVML: memory errors ------------------------------------------------------------------------------------- */

EXPORT int nvmlDeviceGetTotalEccErrors(
    nvmlDevice_t device, unsigned type, unsigned counter, uint64_t *errors)
{
    BEGIN(device, nvmlDeviceGetTotalEccErrors, errors != NULL && type < 2 && counter < 2)
    *errors = type == 1 ? live->uncorrectable_errors : 0u; /* 1: uncorrected */
    END(SUCCESS);
}

EXPORT int nvmlDeviceGetRemappedRows(nvmlDevice_t device, unsigned *correctable,
    unsigned *uncorrectable, unsigned *pending, unsigned *failed)
{
    BEGIN(device, nvmlDeviceGetRemappedRows,
        correctable != NULL && uncorrectable != NULL && pending != NULL && failed != NULL)
    *correctable = *failed = 0;
    *uncorrectable = live->remap_pending ? 1u : 0u;
    *pending = live->remap_pending;
    END(SUCCESS);
}

static int not_supported(nvmlDevice_t device)
{
    BEGIN(device, unsupported, 1)
    END(NOT_SUPPORTED);
}

EXPORT int nvmlDeviceGetMigMode(nvmlDevice_t device, unsigned *current, unsigned *pending)
{
    (void)current;
    (void)pending;
    return not_supported(device);
}

EXPORT int nvmlDeviceGetRetiredPagesPendingStatus(nvmlDevice_t device, unsigned *pending)
{
    (void)pending;
    return not_supported(device); /* row remapping took its place in the Ampere generation */
}

EXPORT int nvmlDeviceGetSerial(nvmlDevice_t device, char *buffer, unsigned length)
{
    (void)buffer;
    (void)length;
    return not_supported(device);
}

EXPORT int nvmlDeviceGetMinorNumber(nvmlDevice_t device, unsigned *minor)
{
    (void)minor;
    return not_supported(device);
}

EXPORT int nvmlDeviceGetFanSpeed(nvmlDevice_t device, unsigned *percent)
{
    (void)percent;
    return not_supported(device);
}

/* ---- control: making a state file ----------------------------------------------------------------------------- */

/* The configuration keys of one GPU's values, comma-separated, in the order of hwsim_create. */
EXPORT const char *hwsim_specification_keys(void)
{
    return &(SPECIFICATION(AS_KEY))[1];
}

static void fill_gpu(struct gpu *gpu, const char *uuid, const char *name, const double *values, double now)
{
    struct live *live = &gpu->copies[0];
    snprintf(gpu->uuid, sizeof gpu->uuid, "%s", uuid);
    snprintf(gpu->name, sizeof gpu->name, "%s", name);
    memcpy(&gpu->spec, values, sizeof gpu->spec);
    live->at_s = now;
    live->limit_w = gpu->spec.default_limit_w;
    live->average_w = gpu->spec.idle_w;
}

/* Write a new file. On failure errno says why and a part of the file may be left. */
EXPORT int hwsim_create(const char *path, unsigned count, const char *const *uuids,
    const char *const *names, const double *values, double clock_s, int allow_nonroot)
{
    size_t bytes = bytes_for(count);
    struct state *made = MAP_FAILED;
    int fd, failure;
    if (count > MAX_GPUS) {
        errno = EINVAL;
        return INVALID_ARGUMENT;
    }
    fd = open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (fd < 0) {
        return OPERATING_SYSTEM;
    }
    /* Blocks are taken now: a full file system is an error here and not a SIGBUS later. */
    failure = posix_fallocate(fd, 0, (off_t)bytes);
    if (failure == 0) {
        made = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        failure = made == MAP_FAILED ? errno : 0;
    }
    close(fd);
    if (failure != 0) {
        errno = failure;
        return OPERATING_SYSTEM;
    }
    made->layout = LAYOUT;
    made->gpu_count = count;
    made->allow_nonroot = allow_nonroot;
    made->clock_is_virtual = !isnan(clock_s);
    made->clock_s = isnan(clock_s) ? 0.0 : clock_s;
    for (unsigned i = 0; i < count; i++) {
        fill_gpu(&made->gpus[i], uuids[i], names[i], values + i * SPECIFICATION_VALUES, now_of(made));
    }
    made->magic = MAGIC;
    munmap(made, bytes);
    return SUCCESS;
}

/* Keep the file when it holds exactly these GPUs; NOT_FOUND when it does not. */
EXPORT int hwsim_adopt(const char *path, unsigned count, const char *const *uuids,
    const char *const *names, const double *values, double clock_s, int allow_nonroot)
{
    struct stat status;
    struct state *old;
    unsigned gpus;
    int code, fd;
    /* Closing the file again gives up this process's lock on it, so no thread may hold that. */
    pthread_mutex_lock(&process_mutex);
    fd = open(path, O_RDWR | O_CLOEXEC);
    old = fd < 0 ? NULL : map_file(fd, &code, &status, &gpus);
    if (fd >= 0) {
        close(fd);
    }
    pthread_mutex_unlock(&process_mutex);
    if (old == NULL) {
        return NOT_FOUND;
    }
    code = gpus == count && old->clock_is_virtual == !isnan(clock_s) ? SUCCESS : NOT_FOUND;
    for (unsigned i = 0; i < count && code == SUCCESS; i++) {
        const struct gpu *gpu = &old->gpus[i];
        if (strncmp(gpu->uuid, uuids[i], UUID_BYTES) != 0
            || strncmp(gpu->name, names[i], NAME_BYTES) != 0
            || memcmp(&gpu->spec, values + i * SPECIFICATION_VALUES, sizeof gpu->spec) != 0) {
            code = NOT_FOUND;
        }
    }
    if (code == SUCCESS) {
        old->allow_nonroot = allow_nonroot;
    }
    munmap(old, (size_t)status.st_size);
    return code;
}

/* ---- control: load ----------------------------------------------------------------------------------------------- */

static int open_for_control(void)
{
    int code;
    pthread_mutex_lock(&process_mutex);
    code = open_state();
    pthread_mutex_unlock(&process_mutex);
    return code;
}

static int begin_control(const char *uuid, struct gpu **gpu, struct live **live)
{
    unsigned index;
    int code = open_for_control();
    if (code == SUCCESS) {
        code = find_uuid(uuid, &index);
    }
    return code == SUCCESS ? begin(index, F_control, gpu, live) : code;
}

#define BEGIN_CONTROL(uuid)                                                                        \
    struct gpu *gpu;                                                                               \
    struct live *live;                                                                             \
    int code = begin_control(uuid, &gpu, &live);                                                   \
    if (code != SUCCESS) {                                                                         \
        return code;                                                                               \
    }

EXPORT int hwsim_find(const char *uuid)
{
    unsigned index;
    int code = open_for_control();
    return code == SUCCESS ? find_uuid(uuid, &index) : code;
}

EXPORT int hwsim_attach(const char *uuid, int pid)
{
    struct process *process;
    BEGIN_CONTROL(uuid)
    code = live->lost != 0 ? live->lost : add_process(live, pid, &process);
    END(code);
}

EXPORT int hwsim_detach(const char *uuid, int pid)
{
    struct process *process;
    BEGIN_CONTROL(uuid)
    process = find_process(live, pid);
    if (process != NULL) {
        remove_process(live, (unsigned)(process - live->processes));
    }
    END(SUCCESS);
}

/* Say how much memory an attached process uses. */
EXPORT int hwsim_set_memory(const char *uuid, int pid, uint64_t bytes)
{
    struct process *process;
    BEGIN_CONTROL(uuid)
    process = find_process(live, pid);
    if (process == NULL) {
        code = INVALID_ARGUMENT;
    } else {
        process->memory_bytes = bytes;
    }
    END(code);
}

/* Register one training step from now on, behind the loads of other processes. */
EXPORT int hwsim_step(const char *uuid, int pid, double flop, double link_bytes, double *wait_s,
    double *compute_s, double *link_s)
{
    struct process *process;
    double start;
    BEGIN_CONTROL(uuid)
    code = live->lost != 0 ? live->lost : add_process(live, pid, &process);
    if (code == SUCCESS) {
        start = live->at_s;
        for (unsigned i = 0; i < live->process_count; i++) {
            if (live->processes[i].pid != pid) {
                start = fmax(start, live->processes[i].link_end_s);
            }
        }
        *wait_s = start - live->at_s;
        *compute_s = flop
            / (gpu->spec.speed_flop_per_s * speed_share(&gpu->spec, enforced_limit_w(live)));
        *link_s = link_bytes / gpu->spec.link_bytes_per_s;
        process->start_s = start;
        process->compute_end_s = start + *compute_s;
        process->link_end_s = process->compute_end_s + *link_s;
    }
    END(code);
}

/* ---- control: the truth, and trouble -------------------------------------------------------------------------------- */

EXPORT int hwsim_true_energy(const char *uuid, double *joules)
{
    BEGIN_CONTROL(uuid)
    *joules = live->energy_j;
    END(SUCCESS);
}

EXPORT int hwsim_true_power(const char *uuid, double *watts)
{
    BEGIN_CONTROL(uuid)
    *watts = power_now_w(gpu, live);
    END(SUCCESS);
}

EXPORT int hwsim_set_clock(double clock_s)
{
    int code = open_for_control();
    if (code == SUCCESS) {
        code = lock_state();
    }
    if (code != SUCCESS) {
        return code;
    }
    if (!state->clock_is_virtual || !(clock_s >= state->clock_s) || !isfinite(clock_s)) {
        code = INVALID_ARGUMENT;
    } else {
        /* Whoever died before this moment draws nothing after it. */
        for (unsigned i = 0; i < state_gpus; i++) {
            bring_up_to_now(&state->gpus[i]);
            commit_draft(&state->gpus[i]);
        }
        state->clock_s = clock_s;
    }
    unlock_state();
    return code;
}

EXPORT int hwsim_set_out_of_band_limit(const char *uuid, double watts)
{
    BEGIN_CONTROL(uuid)
    /* At or below the floor nothing would ever end. */
    if (!isfinite(watts) || watts < 0 || (watts > 0 && watts <= gpu->spec.floor_w)) {
        code = INVALID_ARGUMENT;
    } else {
        live->out_of_band_w = watts;
    }
    END(code);
}

EXPORT int hwsim_set_lost(const char *uuid, int lost)
{
    BEGIN_CONTROL(uuid)
    if (lost != SUCCESS && lost != GPU_IS_LOST && lost != RESET_REQUIRED) {
        code = INVALID_ARGUMENT;
    } else {
        live->lost = lost;
    }
    if (live->lost != 0) {
        live->process_count = 0;
    }
    END(code);
}

EXPORT int hwsim_set_ownerless_memory(const char *uuid, uint64_t bytes)
{
    BEGIN_CONTROL(uuid)
    live->ownerless_bytes = bytes;
    END(SUCCESS);
}

EXPORT int hwsim_set_memory_errors(
    const char *uuid, unsigned uncorrectable, int remap_pending, int recovery_action)
{
    BEGIN_CONTROL(uuid)
    live->uncorrectable_errors = uncorrectable;
    live->remap_pending = remap_pending != 0;
    live->recovery_action = recovery_action;
    END(SUCCESS);
}

EXPORT int hwsim_set_error(const char *uuid, const char *function, int error)
{
    BEGIN_CONTROL(uuid)
    code = INVALID_ARGUMENT;
    for (int i = 0; i < F_control; i++) {
        if (strcmp(FUNCTION_NAMES[i], function) == 0) {
            live->errors[i] = error;
            code = SUCCESS;
        }
    }
    END(code);
}

EXPORT int hwsim_set_counter_zero(const char *uuid, int on)
{
    BEGIN_CONTROL(uuid)
    live->counter_reads_zero = on;
    END(SUCCESS);
}

EXPORT int hwsim_reset_counter(const char *uuid)
{
    BEGIN_CONTROL(uuid)
    live->counter_zero_j = live->energy_j;
    live->published_j = 0.0;
    live->limit_w = gpu->spec.default_limit_w;
    END(SUCCESS);
}

EXPORT int hwsim_set_init_error(int error)
{
    int code = open_for_control();
    if (code == SUCCESS) {
        state->init_error = error;
    }
    return code;
}

EXPORT int hwsim_set_allow_nonroot(int on)
{
    int code = open_for_control();
    if (code == SUCCESS) {
        state->allow_nonroot = on;
    }
    return code;
}
