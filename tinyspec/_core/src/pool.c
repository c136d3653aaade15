/* A pool of threads that meets at barriers many times within a forward pass.
 *
 * A layer of a small model lasts a few microseconds, so waking a sleeping thread for every product would cost more than
 * the product. Workers spin after a job for about as long as Python takes until the next, then sleep; within a job all meet
 * at spinning barriers. Work is taken from counters, not dealt out, so that a thread which the machine holds up does not
 * hold up the others; every result is summed by one thread in a fixed order, whoever that is.
 */
#define _GNU_SOURCE
#include "compute.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>

#if defined(__x86_64__)
#include <immintrin.h>
#define PAUSE() _mm_pause()
#elif defined(__aarch64__)
#define PAUSE() __asm__ volatile("yield")
#else
#define PAUSE() ((void)0)
#endif

enum { MOST = 64, SPINS = 40000, PATIENCE = 2000, COUNTERS = 4 };

struct Team {
    int size;
    _Alignas(64) atomic_int arrived;
    _Alignas(64) atomic_uint phase;
    struct {
        _Alignas(64) atomic_int next;
    } counter[COUNTERS];
};

static struct {
    pthread_mutex_t busy, sleep;
    pthread_cond_t wake;
    int workers; /* started */
    _Alignas(64) atomic_uint job_number;
    _Alignas(64) atomic_int unfinished;
    atomic_int sleeping;
    Job job;
    void *what;
    Team team;
} pool = {.busy = PTHREAD_MUTEX_INITIALIZER, .sleep = PTHREAD_MUTEX_INITIALIZER, .wake = PTHREAD_COND_INITIALIZER};

static void wait_a_bit(int *spins) {
    if (++*spins < PATIENCE)
        PAUSE();
    else
        sched_yield(); /* more threads than cores: let the other one run */
}

int team_size(const Team *team) { return team->size; }

void team_barrier(Team *team) {
    if (team->size == 1) return;
    unsigned phase = atomic_load_explicit(&team->phase, memory_order_relaxed);
    if (atomic_fetch_add_explicit(&team->arrived, 1, memory_order_acq_rel) == team->size - 1) {
        atomic_store_explicit(&team->arrived, 0, memory_order_relaxed);
        atomic_store_explicit(&team->phase, phase + 1, memory_order_release);
        return;
    }
    int spins = 0;
    while (atomic_load_explicit(&team->phase, memory_order_acquire) == phase) wait_a_bit(&spins);
}

int team_take(Team *team, int counter, int step) {
    return atomic_fetch_add_explicit(&team->counter[counter].next, step, memory_order_relaxed);
}

void team_reset(Team *team, int counter) {
    atomic_store_explicit(&team->counter[counter].next, 0, memory_order_relaxed);
}

static void *worker(void *begin) {
    int me = (int)((uintptr_t)begin % MOST);
    unsigned seen = (unsigned)((uintptr_t)begin / MOST); /* jobs before its time */
    for (;;) {
        int spins = 0;
        while (atomic_load_explicit(&pool.job_number, memory_order_acquire) == seen && ++spins < SPINS) PAUSE();
        if (atomic_load_explicit(&pool.job_number, memory_order_acquire) == seen) {
            pthread_mutex_lock(&pool.sleep);
            atomic_fetch_add(&pool.sleeping, 1);
            while (atomic_load(&pool.job_number) == seen) pthread_cond_wait(&pool.wake, &pool.sleep);
            atomic_fetch_sub(&pool.sleeping, 1);
            pthread_mutex_unlock(&pool.sleep);
        }
        seen = atomic_load_explicit(&pool.job_number, memory_order_acquire);
        if (me < pool.team.size) pool.job(pool.what, &pool.team, me);
        atomic_fetch_sub_explicit(&pool.unfinished, 1, memory_order_release);
    }
    return NULL;
}

/* A fork has none of its parent's threads, and may have been made in the middle of a job of another. */
static void forked(void) {
    pool.workers = 0;
    atomic_store(&pool.team.arrived, 0);
    pthread_mutex_init(&pool.busy, NULL);
    pthread_mutex_init(&pool.sleep, NULL);
    pthread_cond_init(&pool.wake, NULL);
    atomic_store(&pool.sleeping, 0);
    atomic_store(&pool.unfinished, 0);
    atomic_store(&pool.job_number, 0);
}

static void start_workers(int wanted) {
    static int watched = 0;
    if (!watched) watched = pthread_atfork(NULL, NULL, forked) == 0;
    while (pool.workers < wanted && pool.workers < MOST - 1) {
        pthread_t thread;
        pthread_attr_t detached;
        pthread_attr_init(&detached);
        pthread_attr_setdetachstate(&detached, PTHREAD_CREATE_DETACHED);
        uintptr_t begin = (uintptr_t)atomic_load(&pool.job_number) * MOST + (uintptr_t)(pool.workers + 1);
        int failed = pthread_create(&thread, &detached, worker, (void *)begin);
        pthread_attr_destroy(&detached);
        if (failed) break;
        pool.workers++;
    }
}

void team_run(int threads, Job job, void *what) {
    /* One job at a time: who comes while another Python thread computes works alone. */
    if (threads <= 1 || pthread_mutex_trylock(&pool.busy) != 0) {
        Team alone = {.size = 1};
        job(what, &alone, 0);
        return;
    }
    if (pool.workers < threads - 1) start_workers(threads - 1);
    pool.job = job;
    pool.what = what;
    pool.team.size = threads < pool.workers + 1 ? threads : pool.workers + 1;
    for (int i = 0; i < COUNTERS; i++) team_reset(&pool.team, i);
    atomic_store_explicit(&pool.unfinished, pool.workers, memory_order_relaxed);
    atomic_fetch_add(&pool.job_number, 1);
    if (atomic_load(&pool.sleeping)) {
        pthread_mutex_lock(&pool.sleep);
        pthread_cond_broadcast(&pool.wake);
        pthread_mutex_unlock(&pool.sleep);
    }
    job(what, &pool.team, 0);
    int spins = 0;
    while (atomic_load_explicit(&pool.unfinished, memory_order_acquire)) wait_a_bit(&spins);
    pthread_mutex_unlock(&pool.busy);
}
