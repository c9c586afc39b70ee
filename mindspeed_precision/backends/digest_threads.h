/* Threads that take pieces of one tensor beside the thread that asked for its digest.
 *
 * Pieces are claimed one by one, so that a helper that wakes late or is put to sleep costs at most the piece
 * that it is at. Who takes which piece changes nothing: what depends on an order is put together by the pieces'
 * numbers. One job at a time has helpers; a second caller works alone. A forked child has none until it asks.
 */
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>

enum { MOST_HELPERS = 15, SPINS = 2000 };

/* `work` claims pieces until there are none, and may run in several threads at once. */
struct job {
    void (*work)(struct job *);
    int64_t pieces;
    _Atomic int64_t next;
    pthread_mutex_t merging;
};

static struct {
    pthread_mutex_t lock;
    pthread_cond_t more, left;
    struct job *job;
    uint64_t number; /* of the job, so that none is begun twice */
    int wanted, started;
    atomic_int inside, busy;
} pool = {.lock = PTHREAD_MUTEX_INITIALIZER, .more = PTHREAD_COND_INITIALIZER, .left = PTHREAD_COND_INITIALIZER};

static inline int64_t claim(struct job *job)
{
    return atomic_fetch_add_explicit(&job->next, 1, memory_order_relaxed);
}

static void *help(void *unused)
{
    uint64_t seen = 0;
    pthread_mutex_lock(&pool.lock);
    for (;;) {
        while (!pool.job || pool.number == seen) pthread_cond_wait(&pool.more, &pool.lock);
        struct job *job = pool.job;
        seen = pool.number;
        atomic_fetch_add(&pool.inside, 1);
        pthread_mutex_unlock(&pool.lock);
        job->work(job);
        pthread_mutex_lock(&pool.lock);
        if (atomic_fetch_sub(&pool.inside, 1) == 1) pthread_cond_signal(&pool.left);
    }
    return unused;
}

/* A child has the memory of its parent, and none of its helpers. */
static void forget_helpers(void)
{
    pthread_mutex_init(&pool.lock, NULL);
    pthread_cond_init(&pool.more, NULL);
    pthread_cond_init(&pool.left, NULL);
    pool.job = NULL, pool.started = 0;
    atomic_store(&pool.inside, 0), atomic_store(&pool.busy, 0);
}

/* Signals are for the program's own threads. Where no thread can be had, there are fewer. */
static void start_helpers(void)
{
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    for (pthread_t helper; pool.started < pool.wanted; pool.started++) {
        if (pthread_create(&helper, NULL, help, NULL)) break;
        pthread_detach(helper);
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

/* Do a job with what helpers there are; returns when no thread is at it. */
static void share(struct job *job)
{
    if (!pool.wanted || atomic_exchange(&pool.busy, 1)) {
        job->work(job);
        return;
    }
    if (pool.started < pool.wanted) start_helpers();
    pthread_mutex_lock(&pool.lock);
    pool.job = job, pool.number++;
    pthread_cond_broadcast(&pool.more);
    pthread_mutex_unlock(&pool.lock);
    job->work(job);
    pthread_mutex_lock(&pool.lock);
    pool.job = NULL; /* who comes now finds nothing */
    pthread_mutex_unlock(&pool.lock);
    for (int spin = 0; spin < SPINS && atomic_load(&pool.inside); spin++) continue; /* its last piece is short */
    pthread_mutex_lock(&pool.lock);
    while (atomic_load(&pool.inside)) pthread_cond_wait(&pool.left, &pool.lock);
    pthread_mutex_unlock(&pool.lock);
    atomic_store(&pool.busy, 0);
}

static void want_helpers(int count)
{
    static int registered;
    if (!registered) registered = !pthread_atfork(NULL, NULL, forget_helpers);
    pool.wanted = !registered || count < 0 ? 0 : count < MOST_HELPERS ? count : MOST_HELPERS;
}
