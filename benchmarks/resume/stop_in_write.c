/* Stops this process when it has written a number of bytes into files below a folder.
 *
 * stopping.py builds and preloads this library. A signal from outside can't stop a process within
 * a call of write(), and Lightning writes a whole checkpoint in one. So the call that reaches the
 * number is divided: its first part is written, the process stops itself, and the rest follows
 * if somebody lets it go on. The files are then as a kill within the call leaves them.
 */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

typedef ssize_t (*write_function)(int, const void *, size_t);
typedef ssize_t (*writev_function)(int, const struct iovec *, int);
typedef ssize_t (*pwrite_function)(int, const void *, size_t, off_t);

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char folder[PATH_MAX];
static volatile long bytes_left = -1; /* negative: nothing is counted */

/* Called by the recorder, before the save. */
void stop_after_bytes(const char *path, long bytes)
{
    pthread_mutex_lock(&lock);
    snprintf(folder, sizeof folder, "%s/", path);
    bytes_left = bytes;
    pthread_mutex_unlock(&lock);
}

static int is_below_folder(int file)
{
    char link[64];
    char path[PATH_MAX];
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0)
        return 0;
    path[length] = 0;
    return strncmp(path, folder, strlen(folder)) == 0;
}

/* Count bytes that are about to be written. Return how many of them to write before the process
 * stops, or -1 if it does not stop in this call. */
static long bytes_before_stop(int file, size_t count)
{
    long before_stop = -1;
    if (bytes_left < 0)
        return -1;
    pthread_mutex_lock(&lock);
    if (bytes_left >= 0 && is_below_folder(file)) {
        if ((long)count < bytes_left) {
            bytes_left -= count;
        } else {
            before_stop = bytes_left;
            bytes_left = -1;
        }
    }
    pthread_mutex_unlock(&lock);
    return before_stop;
}

ssize_t write(int file, const void *buffer, size_t count)
{
    static write_function original;
    if (!original)
        original = (write_function)dlsym(RTLD_NEXT, "write");
    long first = bytes_before_stop(file, count);
    if (first < 0)
        return original(file, buffer, count);
    ssize_t written = original(file, buffer, first);
    raise(SIGSTOP); /* sent to this thread, so nothing follows before the stop */
    return written; /* the caller writes the rest, as after any short write */
}

ssize_t writev(int file, const struct iovec *parts, int count)
{
    static writev_function original;
    if (!original)
        original = (writev_function)dlsym(RTLD_NEXT, "writev");
    if (bytes_left < 0 || count < 1)
        return original(file, parts, count);
    ssize_t written = 0;
    for (int part = 0; part < count; part++) {
        ssize_t now = write(file, parts[part].iov_base, parts[part].iov_len);
        if (now < 0)
            return written > 0 ? written : now;
        written += now;
        if ((size_t)now < parts[part].iov_len)
            break;
    }
    return written;
}

ssize_t pwrite64(int file, const void *buffer, size_t count, off_t offset)
{
    static pwrite_function original;
    if (!original)
        original = (pwrite_function)dlsym(RTLD_NEXT, "pwrite64");
    long first = bytes_before_stop(file, count);
    if (first < 0)
        return original(file, buffer, count, offset);
    ssize_t written = original(file, buffer, first, offset);
    raise(SIGSTOP); /* sent to this thread, so nothing follows before the stop */
    return written;
}

ssize_t pwrite(int file, const void *buffer, size_t count, off_t offset)
{
    return pwrite64(file, buffer, count, offset);
}
